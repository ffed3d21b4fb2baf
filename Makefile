# Everything sets itself up in .venv. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# One thread a process: two test processes share the cores, and OpenMP teams that compete for them collapse.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup

# The machine with the GPU brings its own torch; Triton compiles in every worker. What PYTHONPATH names already (peers to measure) stays.
GPU_PYTHON ?= python3
GPU_WORKERS ?= 12
GPU_ENV := PYTHONPATH=$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH}
GPU_SANITIZE := ragged_lengths and (int4 or int3 or kivi2 or int8 or fp8) or several or prefill or rules or other_geometries
GPU_SANITIZED := tests/gpu/test_gpu_attend.py tests/unit/kernels/test_triton_seal.py

.DEFAULT_GOAL := help
.PHONY: help run test test-slow test-models soak check format bench gpu gpu-sanitize golden clean browser

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

run: $(READY)  ## study the embedded model: which KV format is safe, how small, how fast (6 to 9 minutes)
	$(BIN)/kvarto study --quick --out reports/quick

test: $(READY) browser  ## the test suite, except what is slow or needs the larger models
	$(PYTEST) -m "not models and not slow"

test-slow: $(READY)  ## more random traffic, longer state machines
	$(PYTEST) --timeout=3000 -m slow tests
	KVARTO_MACHINE_EXAMPLES=3000 KVARTO_MACHINE_STEPS=100 $(PYTEST) --timeout=3000 tests/properties

test-models: $(READY)  ## quality on real models, the larger of which are fetched (0.5 GB)
	$(BIN)/kvarto models fetch qwen2.5-coder-0.5b-instruct
	OMP_NUM_THREADS=2 $(BIN)/pytest -m models

soak: $(READY)  ## 10,000 short requests against a server whose memory is always full (8 minutes)
	$(BIN)/python tests/soak.py

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

gpu:  ## kernels on an NVIDIA GPU: tests, then a quick benchmark (GPU_PYTHON=a Python with torch, triton and pytest-xdist)
	@$(GPU_PYTHON) -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null || \
	{ echo "make gpu needs a Python whose torch sees an NVIDIA GPU, and $(GPU_PYTHON) is none: name one with GPU_PYTHON=...; without a GPU the kernels run in Triton's interpreter in: make test" >&2; exit 1; }
	OMP_NUM_THREADS=1 $(GPU_ENV) $(GPU_PYTHON) -m pytest -n $(GPU_WORKERS) -W default tests/gpu tests/unit/kernels/test_triton*.py
	$(GPU_ENV) $(GPU_PYTHON) benchmarks/attention_gpu.py --quick

# Without torch's caching allocator every tensor is an allocation of its own, so that a step beyond one is seen; graphs cannot be captured then.
# The first run compiles, in parallel: under the checker that takes many times as long.
gpu-sanitize:  ## the memory checker of CUDA on a small selection of the GPU tests
	OMP_NUM_THREADS=1 $(GPU_ENV) $(GPU_PYTHON) -m pytest -n $(GPU_WORKERS) -q -W default -k "$(GPU_SANITIZE)" $(GPU_SANITIZED)
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 KVARTO_GPU_LONG=3000 $(GPU_ENV) compute-sanitizer --tool memcheck --error-exitcode 9 \
	$(GPU_PYTHON) -m pytest -n 0 -v -W default -k "$(GPU_SANITIZE)" $(GPU_SANITIZED)

golden: $(READY)  ## write the golden page of each codec that has none yet
	$(BIN)/python tests/golden/write.py

browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } || \
	echo "no Chromium found: the report's browser test will be skipped"

clean:  ## remove the environment and caches of this folder
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
