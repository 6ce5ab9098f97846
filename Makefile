# make ppo: train the built-in model with PPO.  make test: the fast tests (TESTS=tests/config: some of them).  Both set up
# .venv on first use.
PYTHON ?= python3
VENV   := .venv
STAMP  := $(VENV)/.installed
PYTEST := $(VENV)/bin/python -m pytest
TESTS  ?= tests

.PHONY: ppo test test-slow test-gpu lint clean

ppo: $(STAMP)
	$(VENV)/bin/python -m flowrl.main_ppo

test: $(STAMP)
	$(PYTEST) -m "not slow and not gpu" $(TESTS)

test-slow: $(STAMP)
	$(PYTEST) -m "slow and not gpu" $(TESTS)

# Uses the host's own python3: a GPU host brings its torch and CUDA.
test-gpu:
	python3 -m pytest tests/gpu -m gpu

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

$(STAMP): requirements/cpu.lock requirements/torch-cpu.lock requirements/install.sh pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	requirements/install.sh $(VENV)
	touch $@

clean:
	rm -rf $(VENV)
