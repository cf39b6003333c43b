# `make demo` trains and draws the learning curve, `make walk` teaches a quadruped to walk and draws
# it walking, `make test` runs the tests.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 1
ROBOT ?= quadruped

.PHONY: demo walk test check format clean

demo: $(VENV)/.base
	$(BIN)/fastsac train cartpole-swingup --seed $(SEED)

walk: $(VENV)/.base
	$(BIN)/fastsac train $(ROBOT)-velocity --seed $(SEED)
	$(BIN)/python tools/draw_walk.py "$$(ls -td runs/$(ROBOT)-velocity-* | head -1)" walk.png

test: $(VENV)/.dev
	$(BIN)/python -m pytest

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m pytest

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs build dist

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
