PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python

GPU ?= gpu

.PHONY: demo adapt test parity large gradcheck benchmark gpu-check lint ui clean

# Train on the default corpus through Dagster and print the perplexities.
demo: $(VENV)/.installed
	$(RUN) -m pipelines.demo

# Train on documentation, adapt to source code in each of the three ways, and compare them.
adapt: $(VENV)/.installed
	$(RUN) -m pipelines.adapt

# Everything but the parity, browser and engine suites and what takes minutes.
test: $(VENV)/.installed-dev
	$(RUN) -m pytest -m "not parity and not browser and not engine and not large"

# Agreement with transformers, PEFT and torch.
parity: $(VENV)/.installed-parity
	$(RUN) -m pytest -m parity

# What takes minutes or gigabytes.
large: $(VENV)/.installed-dev
	$(RUN) -m pytest -m large

# Every gradient against central differences.
gradcheck: $(VENV)/.installed
	$(RUN) -m mamba_ops.gradcheck

benchmark: $(VENV)/.installed
	$(RUN) benchmarks/cpu_step.py

# Every kernel on your own card, then its times; GPU=NVIDIA chooses an adapter by name.
gpu-check: $(VENV)/.installed-dev
	MAMBA_TEST_ADAPTER="$(GPU)" $(RUN) -m pytest tests/gpu tests/pipelines/test_accelerator.py
	$(RUN) benchmarks/gpu_ops.py --adapter "$(GPU)"
	$(RUN) benchmarks/gpu_step.py --adapter "$(GPU)"

lint: $(VENV)/.installed-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

ui: $(VENV)/.installed
	$(VENV)/bin/dagster dev -w workspace.yaml

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

$(VENV)/.installed-parity: $(VENV)/.installed-dev
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[dev,parity]"
	touch $@

clean:
	rm -rf build dist
