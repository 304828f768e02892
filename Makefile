# make demo: set up and watch the bundled model. make test: set up and run the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

SUDO := $(if $(filter 0,$(shell id -u)),,sudo)

.PHONY: demo test test-browser check setup train-demo clean

demo: $(VENV)/.base
	$(BIN)/setblock demo

test: setup
	$(BIN)/python -m pytest

# The report's page in a headless Chromium: Debian's, installed where there is none.
test-browser: setup
	command -v chromium || command -v chromium-browser || \
		{ $(SUDO) apt-get update && $(SUDO) apt-get install --yes --no-install-recommends chromium; }
	$(BIN)/python -m pytest tests_browser

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

setup: $(VENV)/.ready

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# torch first and pinned: left to a dependency, pip would take the newest build with gigabytes of CUDA.
# TORCH=torch takes the newest one instead, for a machine with a GPU.
TORCH ?= torch==2.13.0
$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) --editable .
	touch $@

$(VENV)/.ready: $(VENV)/.base
	$(PIP) --editable ".[test]"
	touch $@

# Train the bundled models again, from nothing: about two hours on two cores.
train-demo: setup
	$(BIN)/python examples/train_demo.py --output-dir runs/nano

clean:
	rm -rf $(VENV) build *.egg-info
