# Everything a person or CI runs. `make` alone lists it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export PYTHONHASHSEED ?= 0

.DEFAULT_GOAL := help
.PHONY: help setup demo test check fmt lint types layers cov kills gpu clean

help: ## list these targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

setup: $(READY) ## make .venv and install megatrain with its tools into it

# A copied interpreter, so that a program can tell it from the one it was copied from by its path.
# torch first and by version: a bare `torch` would take whatever build is newest.
$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv --copies $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e ".[dev,sample]"
	touch $(READY)

demo: $(READY) ## train SmolLM2-135M on real text on the CPU, then let the result write
	$(BIN)/python scripts/get_sample_model.py
	rm -rf runs/demo-smollm2-135m
	$(BIN)/megatrain train configs/demo-smollm2-135m.yaml
	$(BIN)/python scripts/generate.py runs/demo-smollm2-135m

test: $(READY) check ## set up, then run every check

check: lint types layers cov ## what CI runs

fmt: $(READY) ## format, and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(READY) ## format and style, without changing anything
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY) ## mypy, strict
	$(BIN)/mypy

layers: $(READY) ## imports point down, and thinking is torch-free
	$(BIN)/lint-imports

cov: $(READY) ## all tests that need no GPU, with branch coverage
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" -n auto --maxprocesses 4 \
	  --dist worksteal --cov --cov-report=term

# Real kills of whole runs; make check does 20 of each kind.
kills: $(READY) ## kill runs 100 times at any moment; nothing may be lost (MEGATRAIN_KILLS=N for N)
	OMP_NUM_THREADS=1 MEGATRAIN_KILLS=$${MEGATRAIN_KILLS:-100} $(BIN)/python -m pytest \
	  tests/checkpoint/test_kill.py tests/train/test_kills.py

gpu: ## tests that need a CUDA device
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m pytest -m gpu

clean: ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage
