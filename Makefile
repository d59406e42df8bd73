SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo dev test test-all lint bench lock clean

LOCKS := requirements/build.txt pyproject.toml scripts/bootstrap.sh
BIN := .venv/bin

define DEFAULT_PROMPT
class Counter:
    def __init__(self
endef

# The prompt travels in the environment, never through the shell's quoting: any character is itself.
ifeq ($(origin PROMPT),undefined)
export DEMO_PROMPT := $(DEFAULT_PROMPT)
else
export DEMO_PROMPT := $(value PROMPT)
endif

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

demo: .venv/.installed-core ## the shipped checkpoint continues PROMPT="...", sees a picture, uses a tool
	@JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(BIN)/moe28t demo --prompt="$$DEMO_PROMPT"

dev: .venv/.installed-dev ## install into .venv what notebooks, plots, tests and lint need too

test: .venv/.installed-dev ## run the tests, without the slow ones
	$(BIN)/python -m pytest -n 2 -m "not slow" $(PYTEST_ARGUMENTS)

test-all: .venv/.installed-dev ## run every test
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGUMENTS)

lint: .venv/.installed-dev ## ruff, pyright and the import contract
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: .venv/.installed-dev ## run every benchmarks/bench_*.py, without the peers that are not installed
	@shopt -s nullglob; scripts=(benchmarks/bench_*.py); \
	[ $${#scripts[@]} -gt 0 ] || { echo "There is no benchmarks/bench_*.py to run." >&2; exit 1; }; \
	for script in "$${scripts[@]}"; do echo "== $$script"; JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(BIN)/python "$$script"; done

lock: ## recompute the hash-locked requirements from pyproject.toml
	scripts/bootstrap.sh lock

clean: ## remove environments, caches and build outputs
	rm -rf .venv .bootstrap build dist .pytest_cache .hypothesis .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.installed-core: requirements/core.txt $(LOCKS)
	@scripts/bootstrap.sh core

.venv/.installed-dev: requirements/dev.txt requirements/gpu-compiler.txt $(LOCKS)
	@scripts/bootstrap.sh dev
