# Stopline as an image: the wheel is built in one stage and runs in a slim second one, non-root; no shell is needed.
# No stage compiles anything, so that amd64 and arm64 alike are: docker buildx build --platform linux/amd64,linux/arm64 .
ARG BASE_IMAGE=docker.io/library/python:3.13-slim-trixie

FROM ${BASE_IMAGE} AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY exporter ./exporter
# The packages come first into an environment of their own, without pip; then what this copy of the wheel adds to it.
RUN mkdir /state \
 && python3 -m venv /opt/build \
 && /opt/build/bin/pip install --no-cache-dir --quiet 'hatchling>=1.25' \
 && /opt/build/bin/pip wheel --no-cache-dir --quiet --no-deps --no-build-isolation --wheel-dir /dist . \
 && python3 -m venv --without-pip /opt/stopline \
 && for wheel in /dist/*.whl; do \
      /opt/build/bin/pip --python /opt/stopline/bin/python install --no-cache-dir --quiet --only-binary :all: "${wheel}[traces]" \
   || exit 1; done \
 && /opt/stopline/bin/python -m compileall -q /opt/stopline/lib

FROM ${BASE_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="stopline" \
      org.opencontainers.image.description="Prometheus exporter and alerting sidecar for LLM inference servers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/stopline /opt/stopline
COPY --from=build --chown=65532:65532 /state /var/lib/stopline
ENV PATH=/opt/stopline/bin:$PATH \
    STOPLINE_STATE_DIR=/var/lib/stopline \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
EXPOSE 10777
HEALTHCHECK --interval=30s --timeout=6s --start-period=5s CMD ["python3", "-m", "exporter.alive"]
ENTRYPOINT ["stopline"]
CMD ["run"]
