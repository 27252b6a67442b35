# Two commands for users: `make demo` and `make test`. Both set up .venv first, once.
# Paths are relative to this folder (from elsewhere: make -C FOLDER), so that its own path may hold anything, spaces too.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
MODEL ?= embedded:tiny-clip
TASK ?= tiny-land
OUT ?= out/demo
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test setup lint types tests format clean

help: ## show this list
	@grep -hE '^[a-z]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(READY) ## fine-tune on class names and compare classifiers (MODEL=..., TASK=...)
	@$(BIN)/python -m orion_hf.cli demo --model "$(MODEL)" --task "$(TASK)" --output_dir "$(OUT)"

test: lint types tests ## lint, types and the whole test suite

setup: $(READY) ## create .venv and install the package with its development tools

lint: $(READY) ## ruff
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(READY) ## mypy
	@$(BIN)/mypy

tests: $(READY) ## pytest on every core, a file at a time, one torch thread each (ARGS=tests/test_tasks.py)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

format: $(READY) ## let ruff rewrite the code in the project's style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

$(READY): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { echo "orion-hf: '$(PYTHON)' not found; install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "orion-hf: $$("$(PYTHON)" --version 2>&1) is too old; Python 3.10 or newer is needed: make PYTHON=/path/to/python3.10" >&2; exit 1; }
	@[ -x $(BIN)/python ] || "$(PYTHON)" -m venv $(VENV) || { echo "orion-hf: '$(PYTHON) -m venv' failed; install its venv module (on Debian: apt-get install python3-venv)" >&2; exit 1; }
	@echo "orion-hf: installing into $(VENV) (about two minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,plots,methods]" > $(VENV)/install.log 2>&1 || { echo "orion-hf: installation failed, is the network (the Python package index) within reach? Details: $(VENV)/install.log" >&2; exit 1; }
	@touch $(READY)

clean: ## remove the environment and everything generated
	@rm -rf $(VENV) out build *.egg-info
