# make demo: set up and run the demonstration. make test: set up and run the tests.
# make test-lowest: the same code with the oldest dependencies that pyproject.toml allows.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOWEST := .venv-lowest
LOWEST_TESTS := tests/backbones tests/objectives tests/data tests/tasks/classification tests/tasks/pretraining tests/runs \
	tests/engine/test_schedules.py tests/probing tests/visualization tests/report tests/export tests/security/test_fuzz.py

.PHONY: setup demo test unit slow test-lowest lint format docs clean
.DEFAULT_GOAL := help

help:
	@echo "make setup | demo | test | unit | slow | test-lowest | lint | format | docs | clean"

setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --upgrade pip
	$(RUN)/python -m pip install --quiet -e ".[dev]"
	@touch $(STAMP)

demo: setup
	$(RUN)/frugalvit demo

# One process per core: threads of NumPy and scikit-learn that wait for each other would triple the time.
test unit slow test-lowest: export OMP_NUM_THREADS := 1

test: setup
	$(RUN)/python -m pytest -q -n 2 --dist worksteal tests

unit: setup
	$(RUN)/python -m pytest -q -n 2 --dist worksteal -m unit tests

slow: setup
	$(RUN)/python -m pytest -q -n 2 --dist worksteal --slow tests

test-lowest:
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python .ci/lowest.py > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install --quiet -e ".[streams,video,science,export]" pytest pytest-xdist hypothesis \
		-c $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pytest -q -n 2 --dist worksteal $(LOWEST_TESTS)

lint: setup
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/pyright

format: setup
	$(RUN)/ruff format .
	$(RUN)/ruff check --fix .

docs: setup
	$(RUN)/python -m pip install --quiet -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --strict

clean:
	rm -rf $(VENV) $(LOWEST) build dist *.egg-info src/*.egg-info .pytest_cache .ruff_cache
