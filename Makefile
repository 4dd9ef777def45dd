# Two commands are enough on a fresh machine: `make demo` and `make test`.
#
#   VENV=DIR     use (or make) this virtual environment instead of .venv; a torch 2.11 that is already in it stays
#   PYTHON=EXE   interpreter for a new environment (3.11 or 3.12)

VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
UV := $(VENV)/bin/uv
STAMP := $(VENV)/.loopkv-installed
# The server goes first: it and the tensor-parallel workers (test_scheduling) need the most memory, so not together.
ENGINE_TESTS := tests/engine/test_server.py $(filter-out %/test_server.py,$(sort $(wildcard tests/engine/test_*.py)))
CPU_ENGINE_ENV := VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1

.DEFAULT_GOAL := help
.PHONY: help install demo test lint test-unit test-flow test-engine test-gpu wheel clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP) ## make the environment (PyTorch, vLLM for CPUs, LoopKV)

$(STAMP): pyproject.toml requirements/cpu-engine.txt requirements/cpu-engine-nodeps.txt requirements/vllm-name/pyproject.toml
	@echo "== installing into $(VENV): PyTorch 2.11 (PyPI carries its CUDA build: about 2.5 GB to download, 5 GB on disk),"
	@echo "== vLLM 0.26 for CPUs and LoopKV. To use an environment that has torch 2.11 already: make $(MAKECMDGOALS) VENV=DIR"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@! $(PY) -c 'import importlib.metadata as m; exit("+cpu" in m.version("vllm"))' 2>/dev/null || \
	  { echo "error: $(VENV) has a vLLM of its own, which the CPU engine would replace; wanted another VENV=DIR"; exit 1; }
	@$(PY) -m pip install --quiet --disable-pip-version-check 'uv>=0.9'
	$(UV) pip install --quiet --python $(PY) -r requirements/cpu-engine.txt -e '.[dev,bench]'
	$(UV) pip install --quiet --python $(PY) --no-deps -r requirements/cpu-engine-nodeps.txt
	@touch $(STAMP)
	@echo "== installed; for loopkv and vllm on the path: . $(VENV)/bin/activate"

demo: $(STAMP) ## profile, plan, measure and serve the embedded model; report in build/demo
	$(CPU_ENGINE_ENV) $(VENV)/bin/loopkv demo --output build/demo --task-records results/tasks.jsonl

test: lint test-unit test-flow test-engine ## all checks that need no GPU

lint: $(STAMP) ## style, types, import contracts
	@echo "== lint: ruff, mypy, import contracts"
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

test-unit: $(STAMP) ## laws, bounds and exact values of single modules
	@echo "== unit tests"
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/unit training/tests -n 2 --durations=5

test-flow: $(STAMP) ## profile, plan, layout and engines together on small models
	@echo "== flow tests"
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/flow -n 2 --durations=5

test-engine: $(STAMP) ## the plugin inside the real vLLM engine, on the CPU
	@echo "== engine tests: real vLLM on the CPU"
	OMP_NUM_THREADS=1 $(CPU_ENGINE_ENV) $(PY) -m pytest $(ENGINE_TESTS) -n 2 --dist loadfile --no-loadscope-reorder --durations=5

test-gpu: ## kernels on a CUDA device (uses the current python3 where no environment was made)
	$(if $(wildcard $(PY)),$(PY),$(PYTHON)) -m pytest tests/gpu -vv -ra -n auto --maxprocesses 12

wheel: $(STAMP) ## dist/: a wheel that carries compiled kernels (needs nvcc; without it they are compiled on first use)
	rm -rf build/lib build/bdist.*
	$(PY) -m loopkv.kernels.build --release
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	$(PY) -m wheel tags --platform-tag linux_x86_64 --remove dist/loopkv-*-py3-none-any.whl

clean: ## remove build products (the environment stays)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info
