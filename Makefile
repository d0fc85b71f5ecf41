PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python

.PHONY: demo test parity gradcheck benchmark lint ui clean

# Train on the default corpus through Dagster and print the perplexities.
demo: $(VENV)/.installed
	$(RUN) -m pipelines.demo

# Everything but the parity, browser and engine suites.
test: $(VENV)/.installed-dev
	$(RUN) -m pytest -m "not parity and not browser and not engine"

# Agreement with transformers, PEFT and torch.
parity: $(VENV)/.installed-parity
	$(RUN) -m pytest -m parity

# Every gradient against central differences.
gradcheck: $(VENV)/.installed
	$(RUN) -m mamba_ops.gradcheck

benchmark: $(VENV)/.installed
	$(RUN) benchmarks/cpu_step.py

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
