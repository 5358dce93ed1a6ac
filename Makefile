# `make demo` and `make test` are the two commands to know. Each sets up what it needs by itself.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
SHELL := /bin/bash

# What the tools cache for themselves (jsii, the cdk CLI, matplotlib) stays under build/ as well.
# Nothing that steers AWS's SDKs gets in: a profile fails, an endpoint of a service leads past the emulated AWS.
RUN := env $(foreach name,XDG_CACHE_HOME XDG_CONFIG_HOME $(filter AWS_%,$(.VARIABLES)),-u $(name)) HOME="$(CURDIR)/build/home"

.PHONY: setup demo down test test-fast lint docs bench lock clean

setup: $(READY)

# The stamp is written last, so that an interrupted setup is taken up again.
$(READY): requirements.txt package-lock.json pyproject.toml tools/setup.py
	@$(PYTHON) tools/setup.py

demo: $(READY)
	@KEEP=$(KEEP) $(RUN) $(VENV)/bin/python -m demo

down: $(READY)
	@$(VENV)/bin/python -m trainlocal down --directory build/local

# Two tests at a time (`tests/conftest.py` says which): those of nodes wait much and compute little. WORKERS=0 runs one by one.
WORKERS ?= 2
PYTEST := $(RUN) $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(READY)
	$(PYTEST) $(PYTEST_ARGS)

test-fast: $(READY)
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(READY)
	$(VENV)/bin/python tools/make_docs.py

bench: $(READY)
	@for script in benchmarks/*.py; do $(RUN) $(VENV)/bin/python $$script || exit 1; done

# Needs the package index; the result is committed.
lock: $(READY)
	$(VENV)/bin/python tools/lock.py

clean: down
	rm -rf build cdk.out .pytest_cache .mypy_cache .ruff_cache .hypothesis
