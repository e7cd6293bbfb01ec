# make demo: set up and run the demonstration. make test: set up and run the tests.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test slow lint format docs clean
.DEFAULT_GOAL := help

help:
	@echo "make setup | demo | test | slow | lint | format | docs | clean"

setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --upgrade pip
	$(RUN)/python -m pip install --quiet -e ".[dev]"
	@touch $(STAMP)

demo: setup
	$(RUN)/frugalvit demo

test: setup
	$(RUN)/python -m pytest -q -n 2 --dist worksteal tests

slow: setup
	$(RUN)/python -m pytest -q -n 2 --dist worksteal --slow tests

lint: setup
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/pyright

format: setup
	$(RUN)/ruff format .
	$(RUN)/ruff check --fix .

docs: setup
	$(RUN)/python -m pip install --quiet -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info .pytest_cache .ruff_cache
