# Stopline as an image: the wheel is built in one stage and runs in a slim second one, non-root; no shell is needed.
ARG BASE_IMAGE=docker.io/library/python:3.13-slim-trixie

FROM ${BASE_IMAGE} AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY exporter ./exporter
RUN mkdir /state \
 && python3 -m venv /opt/build \
 && /opt/build/bin/pip install --no-cache-dir --quiet hatchling \
 && /opt/build/bin/pip wheel --no-cache-dir --quiet --no-deps --no-build-isolation --wheel-dir /dist . \
 && python3 -m venv --without-pip /opt/stopline \
 && /opt/build/bin/pip --python /opt/stopline/bin/python install --no-cache-dir --quiet "$(echo /dist/*.whl)[traces]"

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="stopline" \
      org.opencontainers.image.description="Prometheus exporter and alerting sidecar for LLM inference servers" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/stopline /opt/stopline
COPY --from=build --chown=65532:65532 /state /var/lib/stopline
ENV PATH=/opt/stopline/bin:$PATH \
    STOPLINE_STATE_DIR=/var/lib/stopline \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
EXPOSE 10777
HEALTHCHECK --interval=30s --timeout=3s --start-period=5s \
  CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:10777/-/healthy', timeout=2)"]
ENTRYPOINT ["stopline"]
CMD ["run"]
