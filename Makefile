# make demo: everything from nothing to generated text.   make test: the checks that CI runs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Tests run side by side, one thread each; a prompt long enough to be read as a play.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
DEMO_PROMPT := **PROSPERO**\n\nMy brave spirit, come!

.PHONY: install demo test test-slow lint types clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt setup.py $(shell find kernels/kimi_k3_kernels/csrc -type f)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

demo: install
	$(BIN)/kimi-k3 generate --prompt "$$(printf '$(DEMO_PROMPT)')" --max-new-tokens 160 --temperature 0.8 --top-p 0.95 --seed 7

test: install
	$(PYTEST) -n auto --dist loadfile

test-slow: install
	$(PYTEST) -n 1 -m slow

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check kimi_k3 kernels recipes tests

types: install
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache *.egg-info
