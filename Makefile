# `make run` and `make test` need nothing but git, make and python3 (3.11 or newer): they set up .venv themselves.
PYTHON ?= python3
# Build of torch: auto (CUDA if there is an NVIDIA GPU, else CPU), cpu or cuda.
TORCH ?= auto
# A config file for `make run`, and arguments for the commands of `run`, `test` and `bench`.
CONFIG ?=
ARGS ?=

SETUP := $(PYTHON) scripts/setup.py --torch $(TORCH)
BIN := .venv/bin
# A file's tests share what they make, so that one process runs them; the longest files come first.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder

# Commands and tests start many interpreters: each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run test test-all check docs bench setup all-extras libero simulators clean

help:  ## Show this list
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/  make \1 \2/p' Makefile | awk '{ $$2 = sprintf("%-11s", $$2); print "  " $$0 }'
	@echo
	@echo "  Examples: make run ARGS='seed=3 run.iterations=20'    make run CONFIG=my.yaml    make test ARGS='-k config'"

run:  ## Train the default experiment: MetaWorld reach-v3 from state observations, about a minute
	@$(SETUP) metaworld
	@$(BIN)/embodyrl run $(if $(CONFIG),"$(CONFIG)") $(ARGS)

test:  ## Run the tests in minutes, one process per usable core (ARGS='-n 0': in one process)
	@$(SETUP) metaworld maniskill vla data serve dev
	@$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not by_hand" $(ARGS)

test-all:  ## Run all tests: also repeated kills, further cases, more random ones, published sizes
	@$(SETUP) metaworld maniskill vla data ray serve dev
	@$(BIN)/python -m pytest $(PARALLEL) --hypothesis-profile=all $(ARGS)

check:  ## Lint, check formatting, types and the layers of the architecture
	@$(SETUP) metaworld maniskill vla data serve dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

docs:  ## Build the documentation site in build/site; a dead link or anchor is an error
	@$(SETUP) docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo 'build/site is ready; to read it: .venv/bin/python -m http.server --directory build/site --bind 127.0.0.1'

bench:  ## Measure the speed that the README states, next to Stable-Baselines3
	@$(SETUP) metaworld maniskill vla data dev
	@$(BIN)/python benchmarks/vs_sb3.py $(ARGS)

setup:  ## Set up .venv for run, test, check and bench, and stop there
	@$(SETUP) metaworld maniskill vla data serve dev

all-extras:  ## Set up .venv with every simulator, model and tool
	@$(SETUP) metaworld maniskill libero mujoco pusht robotics aloha hil dm-control robosuite vla bnb data ray serve figures dev

libero:  ## Set up .venv with LIBERO
	@$(SETUP) libero

simulators:  ## Set up .venv with MuJoCo locomotion, PushT, Fetch and Adroit, ALOHA, gym-hil, dm_control and robosuite
	@$(SETUP) mujoco pusht robotics aloha hil dm-control robosuite

clean:  ## Remove caches and build leftovers (keeps .venv and runs)
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
