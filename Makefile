# Everything sets itself up; `make run` and `make test` work from a fresh clone on a fresh Debian machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTEST := -m "not engine" -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: run test test-engine test-image lint format soak fuzz bench bench-accuracy bench-alerts bench-engine bench-page bench-ramp bench-rules bench-tools boards pages coverage packages clean

run: $(INSTALLED)
	$(BIN)/stopline demo $(ARGS)

test: packages lint
	$(BIN)/python -m pytest $(PYTEST)

coverage: packages lint
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(PYTEST)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

test-engine: packages $(INSTALLED)
	$(BIN)/python -m pytest -m engine -s

test-image: packages $(INSTALLED)
	@./.ci/packages podman=podman buildah=buildah crun=crun conmon=conmon catatonit=catatonit mmdebstrap=mmdebstrap ip=iproute2
	tests/deploy/image/run.sh

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

soak: $(INSTALLED)
	@./.ci/packages gcc=gcc
	$(BIN)/python tests/soak.py $(ARGS)

fuzz: $(INSTALLED)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[fuzz]'
	$(BIN)/python tests/fuzz/campaign.py $(ARGS)

bench-engine: $(INSTALLED)
	$(BIN)/python tests/bench/beside_vllm.py $(ARGS)

bench: $(INSTALLED)
	@./.ci/packages mtail=mtail gcc=gcc
	$(BIN)/python tests/bench/run.py $(ARGS)

bench-accuracy: $(INSTALLED)
	$(BIN)/python tests/bench/accuracy.py $(ARGS)

bench-ramp: $(INSTALLED)
	$(BIN)/python tests/bench/ramp.py $(ARGS)

bench-tools: $(INSTALLED)
	@./.ci/packages hey=hey
	$(BIN)/python tests/bench/beside_tools.py $(ARGS)

bench-rules: packages $(INSTALLED)
	$(BIN)/python tests/bench/scale.py $(ARGS)

bench-alerts: packages $(INSTALLED)
	$(BIN)/python tests/bench/alerts.py $(ARGS)

bench-page: packages $(INSTALLED)
	$(BIN)/python tests/bench/page.py $(ARGS)

boards: packages $(INSTALLED)
	$(BIN)/python grafana/generate.py
	deploy/helm/copy-files
	@./.ci/packages node=nodejs npm=npm chromium=chromium pngquant=pngquant
	cd grafana/preview && npm install --ignore-scripts --legacy-peer-deps --no-package-lock --no-audit --no-fund --silent && npm run --silent build
	$(BIN)/python grafana/preview/photograph.py $(ARGS)

pages: packages $(INSTALLED)
	@./.ci/packages chromium=chromium pngquant=pngquant
	$(BIN)/python deploy/pictures/photograph.py $(ARGS)

packages:
	@./.ci/packages promtool=prometheus prometheus=prometheus amtool=prometheus-alertmanager chromium=chromium gcc=gcc curl=curl openssl=openssl systemd-analyze=systemd logrotate=logrotate

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || ./.ci/packages venv-missing=python3-venv
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .cache grafana/preview/node_modules grafana/preview/.build .coverage* .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
