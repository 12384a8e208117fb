# Every target first makes, or finds, the environment it needs (scripts/setup_env.sh).

PORT ?= 8000
MODEL ?=
ARGS ?=
HOST ?=

PY = PYTHONPATH="$(CURDIR)" .venv/bin/python
BENCHES = $(basename $(notdir $(shell grep -l '__main__' loadtest/micro/*.py)))

.DEFAULT_GOAL := help
.PHONY: help serve test test-smollm2 test-heavy test-clients test-browser test-loadtest check check-format check-lint \
	check-types check-imports check-shape check-web check-deploy check-docker format bench loadtest lock clean

help:
	@echo 'make serve         start a server (PORT=8000, MODEL=folder, GGUF file or hub id, ARGS="--flags")'
	@echo 'make test          the tests (ARGS="tests/ipc -x" for some of them)'
	@echo 'make test-smollm2  the tests on the real SmolLM2-135M-Instruct'
	@echo 'make test-heavy    the tests that take minutes'
	@echo 'make test-clients  the tests with other clients and with our own as packages, in Python and node'
	@echo 'make test-browser  the tests of the web pages; needs Chromium and node (apt-get install chromium nodejs)'
	@echo 'make check-web     types of the web pages'"'"' scripts; needs npm'
	@echo 'make test-loadtest the tests of the load test, with locust'
	@echo 'make check         format, lint, types, imports, shape: what CI wants'
	@echo 'make check-deploy  lint the Dockerfile, compose.yaml, the Kubernetes manifest, the unit and the alerts'
	@echo 'make check-docker  build the image in a clean Debian root and start it (root and debootstrap; minutes)'
	@echo 'make format        put the code in the form that make check wants'
	@echo 'make bench         the micro-benchmarks'
	@echo 'make loadtest      users that chat with a server (HOST=http://…; else one is started on MODEL), ARGS="--flags"'
	@echo 'make lock          renew requirements/lock.txt'
	@echo 'make clean         remove caches and the link to the environment'

# exec, so that signals reach the server and not a shell in front of it.
serve:
	@scripts/setup_env.sh serve
	@exec env $(PY) -m streamserve serve $(MODEL) --port $(PORT) $(ARGS)

test:
	@scripts/setup_env.sh test
	$(PY) -m pytest $(ARGS)

test-smollm2:
	@scripts/setup_env.sh test
	$(PY) -m pytest -m smollm2 $(ARGS)

test-heavy:
	@scripts/setup_env.sh test bench
	$(PY) -m pytest -m heavy $(ARGS)

test-clients:
	@scripts/setup_env.sh test clients
	$(PY) -m pytest -m clients $(ARGS)

test-browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null \
	  || { echo 'error: Chromium is not installed; on Debian: apt-get install -y chromium nodejs' >&2; exit 2; }
	@scripts/setup_env.sh test browser
	$(PY) -m pytest -m browser $(ARGS)

# Not a part of `make check`: it asks npm for the compiler.
check-web:
	cd clients/web && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error && npm run --silent check

test-loadtest:
	@scripts/setup_env.sh test loadtest
	$(PY) -m pytest -m loadtest $(ARGS)

check: check-format check-lint check-types check-imports check-shape

check-format check-lint check-types check-imports check-shape: .check-env

.PHONY: .check-env
.check-env:
	@scripts/setup_env.sh test check

check-format:
	$(PY) -m ruff format --check

check-lint:
	$(PY) -m ruff check

check-types:
	$(PY) -m mypy

check-imports:
	PYTHONPATH="$(CURDIR)" .venv/bin/lint-imports --no-logo

check-shape:
	$(PY) -m pytest -q tests/test_shape.py

check-deploy:
	@scripts/setup_env.sh deploy
	scripts/check_deploy.sh

check-docker:
	scripts/check_dockerfile.sh $(ARGS)

format:
	@scripts/setup_env.sh check
	$(PY) -m ruff check --fix-only --quiet
	$(PY) -m ruff format

bench:
	@scripts/setup_env.sh test bench
	@for name in $(BENCHES); do echo "== $$name"; $(PY) -m loadtest.micro.$$name || exit 1; done

# -u and what else ARGS says win over these.
loadtest:
	@scripts/setup_env.sh serve loadtest
	@mkdir -p build/loadtest
	@$(PY) -m loadtest.load.serving "$(HOST)" "$(MODEL)" --headless -u 16 -r 16 -t 60s --csv build/loadtest/run $(ARGS)

lock:
	scripts/update_lock.sh $(TORCH)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
