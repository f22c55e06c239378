# make demo and make test set up .venv on a fresh machine and run; nothing else is needed.
PYTHON ?= python3
# one CPU build for development, installed before anything that depends on torch
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# one thread a process: the tests run in as many processes as there are cores
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.PHONY: demo test lint types ci clean

demo: $(READY)
	@HF_HUB_OFFLINE=1 $(BIN)/prefixtree demo

test: $(READY)
	$(TEST_ENV) $(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

$(READY): pyproject.toml
	@echo "setting up $(VENV) (once, about a minute)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" numpy
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
