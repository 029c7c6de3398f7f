# `make demo` and `make test` each do all set-up alone (scripts/setup.sh, into .venv).
#   TORCH_SPEC="torch==2.14.1"  install this torch instead of the one chosen
#   ARGS="--model DIR"          further arguments of the demo; for the tests: of pytest
.DEFAULT_GOAL := help
.PHONY: help setup demo test faults soak lint format clean

BIN := .venv/bin
ARGS ?=
MINUTES ?= 20

help:
	@echo "make demo    set up, then run a real model on 2 workers and stream an answer"
	@echo "make test    set up, then ruff, mypy and all tests"
	@echo "make faults  kill and stop every process of servers in a loop, and print the table"
	@echo "make soak MINUTES=20   random arrivals, cancels and kills"
	@echo "make lint    ruff and mypy only"
	@echo "make format  let ruff format the code"
	@echo "make clean   remove .venv, caches and build output"

setup:
	@sh scripts/setup.sh

demo: setup
	@$(BIN)/tp-runtime demo $(ARGS)

lint: setup
	@echo "ruff check"; $(BIN)/ruff check --quiet .
	@echo "ruff format --check"; $(BIN)/ruff format --quiet --check .
	@echo "mypy"; $(BIN)/mypy -p tp_runtime

test: lint
	@$(BIN)/python -m pytest -m "not slow and not faults" $(ARGS)

faults: setup
	@$(BIN)/python -m pytest -m faults --timeout 600 tests/faults tests/launch $(ARGS)

soak: setup
	@$(BIN)/python -m tests.faults.soak --minutes $(MINUTES) $(ARGS)

format: setup
	@$(BIN)/ruff check --quiet --fix .; $(BIN)/ruff format .

clean:
	rm -rf .venv .venv.lock build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
