# `make test`, `make demo` and `make docs` set up everything they need, from nothing. On Windows run them from Git Bash.
ifeq ($(OS),Windows_NT)
PYTHON ?= python
SCRIPTS := Scripts
else
PYTHON ?= python3
SCRIPTS := bin
endif
VENV ?= .venv
BIN := $(VENV)/$(SCRIPTS)
STAMP := $(VENV)/.installed
WORKERS ?= 2
# Modules are compiled when they are first imported: most of those that are installed never are.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

.PHONY: setup test lint docs dist demo clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[test]'
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS)

docs: $(STAMP)
	$(BIN)/zensical build --clean --strict

dist: $(STAMP)
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

demo: $(STAMP)
	$(BIN)/trueup demo --out out

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .cache build dist site
