# Everything sets itself up in .venv. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# One thread a process: two test processes share the cores, and OpenMP teams that compete for them collapse.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help run test test-models check format bench gpu golden clean browser

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (a few minutes the first time)"
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "kvarto needs Python 3.11 or newer, this is %d.%d; run: make PYTHON=python3.11" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[engine,dev]'
	@touch $@

run: $(READY)  ## study the embedded model: which KV format is safe, how small, how fast (about 6 minutes)
	$(BIN)/kvarto study --quick --out reports/quick

test: $(READY) browser  ## the whole test suite, except the larger models
	$(PYTEST) -m "not models"

test-models: $(READY)  ## tests on the larger real models, which are fetched (0.5 GB)
	$(BIN)/kvarto models fetch qwen2.5-coder-0.5b-instruct
	OMP_NUM_THREADS=2 $(BIN)/pytest -m models

check: $(READY)  ## format, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)  ## format the code and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## CPU attention against torch SDPA; writes benchmarks/baselines/attention_cpu.json
	$(BIN)/python benchmarks/attention_cpu.py

gpu:  ## kernels on a GPU (none yet: the GPU kernels are the next milestone)
	@echo "kvarto has no GPU kernels yet; CPU kernels are tested by 'make test'" >&2; exit 1

golden: $(READY)  ## write the golden page of each codec that has none yet
	$(BIN)/python tests/golden/write.py

browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } || \
	echo "no Chromium found: the report's browser test will be skipped"

clean:  ## remove the environment and caches of this folder
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
