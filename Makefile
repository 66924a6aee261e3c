# Everything runs from .venv, which `make install` creates; only Python 3.11+ and make are needed.

PYTHON   ?= python3
BIN      := .venv/bin
STAMP    := .venv/.installed
PEERS    := .venv-peers
COMPILERS := .venv-compilers
MESH_TF  := .venv-mesh-tensorflow
NEWEST   := .venv-newest
# The newest JAX needs a newer Python than 3.11. Those of pyenv are often not on the PATH.
NEWEST_PYTHON ?= $(shell for p in python3.13 $$HOME/.pyenv/versions/3.13.*/bin/python \
  python3.12 $$HOME/.pyenv/versions/3.12.*/bin/python; do "$$p" -c "" 2>/dev/null && echo "$$p" && break; done)
WORKERS  ?= 3 # some tests wait for processes and servers; each worker may need 4 GB
EXAMPLES ?= 10000

.DEFAULT_GOAL := help
.PHONY: help install demo check test test-docs coverage test-peers test-compilers test-compilers-quick test-newest test-newest-quick newest-python soak lint format bench bench-peers pictures docs clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## create .venv and install Weft with its tools (again when pyproject.toml changes)

# pip -q still prints warnings and errors; nothing is hidden.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "Weft needs Python 3.11 or later; %s is %s. Try: make PYTHON=python3.11 install" \
	  % (sys.executable, sys.version.split()[0]))'
	@test -x $(BIN)/python || { echo "creating .venv"; $(PYTHON) -m venv .venv; }
	@echo "installing Weft and its development tools into .venv (the first time takes a few minutes)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@
	@echo "installed"

demo: install ## train a translator on 8 virtual devices and let it translate (a few minutes)
	@$(BIN)/weft demo

check: lint ## lints, types and the tests that need no devices (a minute)
	@$(BIN)/python -m pytest -n $(WORKERS) -m nodevice -q

test: install ## the tests of the package, all but the slow ones (8 minutes)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --ignore tests/docs --ignore tests/benchmarks

test-docs: install ## every block and command of the documentation, the examples and the benchmarks' models
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/docs tests/benchmarks

coverage: install ## the same, with how much of the package they run (half as long again)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --cov weft --cov-report term:skip-covered --cov-fail-under 90

# PyTorch is large, and Weft does not need it: it gets an environment of its own.
test-peers: $(PEERS)/.installed ## the same numbers as PyTorch (2 minutes; the first time installs it)
	@$(PEERS)/bin/python -m pytest tests/peers

$(PEERS)/.installed: pyproject.toml
	@test -x $(PEERS)/bin/python || { echo "creating $(PEERS)"; $(PYTHON) -m venv $(PEERS); }
	@echo "installing Weft and PyTorch into $(PEERS) (the first time takes a few minutes)"
	@$(PEERS)/bin/python -m pip install -q --disable-pip-version-check -e '.[peers]'
	@touch $@
	@echo "installed"

# The vendors' compilers need no TPU or GPU. One runs at a time, so there is one worker.
test-compilers: $(COMPILERS)/.installed ## compile all families of programs for TPUs and GPUs (the first time installs)
	@JAX_PLATFORMS=cpu $(COMPILERS)/bin/python -m pytest tests/compilers -m 'slow or not slow'

test-compilers-quick: $(COMPILERS)/.installed ## a part of them for TPUs (5 minutes)
	@JAX_PLATFORMS=cpu $(COMPILERS)/bin/python -m pytest tests/compilers/test_families.py -k 'not gpu'

$(COMPILERS)/.installed: pyproject.toml
	@test -x $(COMPILERS)/bin/python || { echo "creating $(COMPILERS)"; $(PYTHON) -m venv $(COMPILERS); }
	@echo "installing Weft, libtpu and JAX's CUDA plugin into $(COMPILERS) (the first time takes a few minutes)"
	@$(COMPILERS)/bin/python -m pip install -q --disable-pip-version-check -e '.[dev,tpu-compiler,gpu-compiler]'
	@touch $@
	@echo "installed"

test-newest: $(NEWEST)/.installed ## the tests with the latest JAX, on the newest Python found (3.12 or 3.13)
	@$(NEWEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal --ignore tests/docs --ignore tests/benchmarks

# What a new JAX breaks first: unstable names, collectives in the HLO, plans, and some random programs.
test-newest-quick: $(NEWEST)/.installed ## a part of them (5 minutes)
	@$(NEWEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal tests/core/test_jax_compat.py \
	  tests/core/test_collectives.py tests/core/test_programs.py tests/plan/test_plan.py tests/theorem

newest-python: # print it; nothing if there is none
	@echo $(NEWEST_PYTHON)

$(NEWEST)/.installed: pyproject.toml
	@test -n "$(NEWEST_PYTHON)" || { echo "no Python 3.12 or 3.13, which the latest JAX needs; \
	  give one: make NEWEST_PYTHON=/path/to/python3.13 test-newest"; exit 1; }
	@test -x $(NEWEST)/bin/python || { echo "creating $(NEWEST)"; $(NEWEST_PYTHON) -m venv $(NEWEST); }
	@echo "installing Weft and the latest JAX into $(NEWEST) (the first time takes a few minutes)"
	@$(NEWEST)/bin/python -m pip install -q --disable-pip-version-check --upgrade-strategy eager -U -e '.[dev]'
	@touch $@
	@echo "installed"

# Chunks that passed are kept in .soak/, by the hash of the code; an interrupted run goes on from there.
soak: install ## the slow tests, resumable (EXAMPLES=10000)
	@SOAK_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -m slow -n $(WORKERS) \
	  --soak --hypothesis-profile=soak --timeout=3600

lint: install ## formatting, lints and types, nothing is changed
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/mypy weft examples

format: install ## format, and mend what the linter can
	@$(BIN)/ruff check --fix-only
	@$(BIN)/ruff format

bench: install ## time Weft against hand-written JAX
	@$(BIN)/python -m benchmarks.run

bench-peers: install $(PEERS)/.installed $(MESH_TF)/.installed ## time Weft against its peers (20 minutes)
	@$(BIN)/python -m benchmarks.peers.run

$(MESH_TF)/.installed: benchmarks/peers/mesh-tensorflow.txt
	@test -x $(MESH_TF)/bin/python || { echo "creating $(MESH_TF)"; $(PYTHON) -m venv $(MESH_TF); }
	@echo "installing Mesh-TensorFlow into $(MESH_TF) (the first time takes a few minutes)"
	@$(MESH_TF)/bin/python -m pip install -q --disable-pip-version-check -r $<
	@touch $@
	@echo "installed"

pictures: install ## draw the documentation's pictures again
	@$(BIN)/python -m docs.pictures.make

docs: install ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove what can be made again, except .venv and the record of the soak
	@rm -rf site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## remove all environments and the record of the soak as well
	@rm -rf .venv $(PEERS) $(COMPILERS) $(MESH_TF) $(NEWEST) .soak
