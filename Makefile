# What a person runs by hand. Everything below happens in .venv and in folders that git ignores.

.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules

# The lock holds for these: make lock compiles it for each. Of a package that SGLang pins (outlines-core) no wheel is for 3.13.
PYTHONS := 3.11 3.12
IS_KNOWN := import sys; sys.exit("%d.%d" % sys.version_info[:2] not in "$(PYTHONS)".split())
PYTHON ?= $(shell for name in $(PYTHONS:%=python%) python3 python; do \
  $$name -c '$(IS_KNOWN)' 2>/dev/null && { echo $$name; exit; }; done; echo python3)
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements/cpu.lock
# Packages whose Python files tests read, and nobody imports.
SOURCES := requirements/sources.txt
# Named after the content, not its date: a checkout that changes no pin installs nothing.
INSTALLED := $(VENV)/installed-$(shell cat $(LOCK) $(SOURCES) setup.py | sha256sum | cut -c1-16)
# Not .venv's, which is for CPUs.
GPU_PYTHON ?= python3
INPUTS := .cache/quickstart
SFT_RUN := runs/quickstart-sft
RUN := runs/quickstart

# Two OpenMP threads beside other busy processes run many times slower than one.
ONE_THREAD := OMP_NUM_THREADS=1

.PHONY: help setup quickstart slurm system-packages bubblewrap test test-fast lint format lock docs bench gpu-check clean

help: ## This list
	@printf 'megarl: make <target>\n\n'
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1|\2/' | column -t -s '|'
	@printf '\nAnother interpreter for .venv: make setup PYTHON=/path/to/python3.12\n'

setup: $(INSTALLED) ## Make .venv from requirements/cpu.lock, with pip alone; instant where it is up to date

# Compiled on all cores, where pip takes one; files that are for another Python compile nowhere. Where Python writes no bytecode
# each process of a run would else compile what it loads.
$(INSTALLED):
	@$(PYTHON) -c '$(IS_KNOWN)' 2>/dev/null || { \
	  printf 'megarl: the packages are locked for Python $(subst $() , or ,$(PYTHONS)), and "%s" is %s.\n' '$(PYTHON)' \
	    "$$($(PYTHON) --version 2>/dev/null || echo 'no Python that runs')"; \
	  printf 'Install one of them beside it and name it: make setup PYTHON=/path/to/python3.12\n'; exit 2; } >&2
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  printf 'megarl: "%s" cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv, or python3.12-venv\n' \
	    '$(PYTHON)'; exit 2; } >&2
	@echo "== installing into $(VENV) from $(LOCK); about 2 GB, once"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --no-deps --no-compile -r $(LOCK)
	@$(BIN)/python -m pip install --quiet --no-deps --no-compile --no-build-isolation -e .
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib megarl || true
	@$(BIN)/python -c 'import torch' || { \
	  printf 'megarl: torch was installed but cannot be imported (above). The lock leaves out the CUDA libraries, so that\n'; \
	  printf 'torch must be its CPU build: requirements/README.md says how pip finds it.\n'; exit 2; } >&2
	@$(BIN)/python -m pip download --quiet --no-deps --only-binary :all: -d $(VENV)/sources -r $(SOURCES) || { \
	  printf 'megarl: the packages of $(SOURCES) were not found (above); everything but the tests of CUDA layers works without.\n'; \
	  printf 'Where an index has them: $(BIN)/python -m pip download --no-deps --only-binary :all: -d $(VENV)/sources -r $(SOURCES)\n'; }
	@rm -f $(VENV)/installed-*
	@touch $@

$(INPUTS)/model/config.json: tools/make_tiny_model.py | $(INSTALLED)
	@echo "== making a tiny Qwen3 with random weights"
	@$(BIN)/python tools/make_tiny_model.py --out $(INPUTS)/model

$(INPUTS)/data/sft.jsonl: tools/make_arithmetic.py | $(INSTALLED)
	@echo "== making the arithmetic task"
	@$(BIN)/python tools/make_arithmetic.py --out $(INPUTS)/data

# Runs once: a finished run, which has its HF folder, is shown again; an unfinished one goes on from its last
# checkpoint, or begins anew where it has none. $(1): megarl's command, $(2): recipe, $(3): the run's folder.
define run_once
if [ -f $(3)/hf/config.json ]; then \
  echo "== $(3) is there already (to train it again: rm -r $(3))"; \
  $(BIN)/megarl report $(3); \
elif compgen -G '$(3)/checkpoints/step_*/COMMITTED' >/dev/null; then \
  $(BIN)/megarl $(1) $(2) --resume; \
else \
  rm -rf $(3); \
  $(BIN)/megarl $(1) $(2); \
fi
endef

# Each line that begins with blanks is a command that works as it is.
NEXT := '' 'Where to go next:' \
  '  $(BIN)/megarl eval recipes/quickstart.yaml model.path=$(RUN)/hf' '      grades what it learned on the held-out rows' \
  '  $(BIN)/megarl plan recipes/quickstart.yaml --from-run $(RUN)' '      says where the seconds went, and what would be faster' \
  '  $(BIN)/megarl recipe show recipes/quickstart.yaml --essential' '      shows the keys that a recipe of your own sets' \
  'Your own data: docs/data.md. Your own reward: docs/rewards.md. Reading a run: docs/reading_a_run.md.'

quickstart: $(INSTALLED) $(INPUTS)/model/config.json $(INPUTS)/data/sft.jsonl ## Train a tiny model: a warm start by SFT, then GRPO
	@echo "== warm start"
	@$(call run_once,sft,recipes/quickstart_sft.yaml,$(SFT_RUN))
	@echo "== reinforcement learning"
	@$(call run_once,train,recipes/quickstart.yaml,$(RUN))
	@printf '%s\n' $(NEXT)

slurm: ## Install SLURM's packages for the tests marked slurm (as root, on Debian and Ubuntu); instant where they are
	@tests/support/install_slurm.sh

# One after the other: two of apt would meet at its lock.
system-packages:
	@tests/support/install_slurm.sh
	@tests/support/install_bubblewrap.sh

bubblewrap: ## Install bubblewrap, which code of a model is run in (as root, on Debian and Ubuntu); instant where it is
	@tests/support/install_bubblewrap.sh

test: ## All checks and all tests, several files at a time; 20 minutes on two cores are the aim
	@$(MAKE) --no-print-directory -j 2 system-packages lint
	$(ONE_THREAD) $(BIN)/python -m tests.suite

test-fast: bubblewrap $(INSTALLED) ## The tests that start no servers; 5 minutes on two cores
	$(ONE_THREAD) $(BIN)/python -m tests.suite -q -m "not slow and not gpu"

lint: $(INSTALLED) ## Formatting, linter, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --num-workers 2

format: $(INSTALLED) ## Format the code, and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: ## Compile requirements/cpu.lock anew; needs uv (requirements/README.md)
	@command -v uv >/dev/null || { echo 'megarl: compiling the lock needs uv; requirements/README.md says how' >&2; exit 2; }
	cd requirements && uv pip compile cpu.in --override cpu-overrides.txt --python-version $(firstword $(PYTHONS)) --no-header --upgrade -o cpu.lock.new
	cd requirements && for version in $(PYTHONS); do \
	  uv pip compile cpu.in --override cpu-overrides.txt --python-version $$version --no-header --no-annotate -c cpu.lock.new --quiet \
	  | diff <(grep -v '^ *#' cpu.lock.new) - >&2 || { echo "megarl: Python $$version wants other packages (above)" >&2; exit 1; }; done
	{ echo '# Compiled from cpu.in and cpu-overrides.txt by `make lock`. Install with: pip install --no-deps -r requirements/cpu.lock'; \
	  cat requirements/cpu.lock.new; } > $(LOCK)
	rm requirements/cpu.lock.new

docs: $(INSTALLED) ## The pages as one searchable site, in site/; every link is checked
	$(BIN)/mkdocs build --strict
	@echo "open site/index.html"

bench: $(INSTALLED) ## All benchmarks, one after the other; results in bench/results/
	for script in bench/*.py; do echo "== $$script"; $(ONE_THREAD) $(BIN)/python -m bench.$$(basename "$$script" .py); done

gpu-check: ## The engine's tests on this machine's GPUs, and what it lacks (docs/gpu.md); GPU_PYTHON=... names its Python
	@$(GPU_PYTHON) -m tools.gpu_check

clean: ## Remove caches and the quickstart's inputs; runs/ and .venv stay
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site *.egg-info $(INPUTS)
	find megarl tests tools bench -name __pycache__ -type d -prune -exec rm -rf {} +
