# Everything sets itself up in $(VENV): `make demo` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The GPU extra to install for the demo: empty on a machine without an NVIDIA driver.
comma := ,
GPU := $(if $(shell command -v nvidia-smi),$(comma)cuda13)
# Said before anything is installed; and where PyTorch is not yet, on Linux without a GPU, what its plain build brings: pip
# cannot choose the CPU build by itself.
define say_what_is_installed
	@echo "Installing into $(VENV) what this target needs, JAX and PyTorch among it. This takes some minutes, once."
	@test -n "$(GPU)" || test "$$(uname)" != Linux || $(BIN)/python -c "import torch" 2>/dev/null || echo \
	  "PyTorch's plain build brings 6 GB of CUDA, which this machine has no use for. To avoid that, stop here and" \
	  "install the CPU build of $$(grep ^torch= constraints.txt) with $(BIN)/pip, as PyTorch's installation page says."
endef

.PHONY: demo test test-hopper lint docs dist gpu-check clean

demo: $(VENV)/examples  ## train a language model with cce_jax, cce_torch and full logits; out/compare_losses.png
	$(BIN)/python examples/compare_losses.py

test: $(VENV)/dev  ## all tests that need no GPU, on all cores
	$(BIN)/python -m pytest -n auto --dist worksteal

# Mosaic GPU has an interpreter, and XLA compiles for a GPU that is not there, from JAX 0.11 on: Python 3.12.
test-hopper: $(VENV)/hopper  ## tests of the kernels for Hopper GPUs, interpreted, and of what programs hold on an H200
	$(BIN)/python -m pytest -n auto $(addprefix tests/test_,hopper.py block_sparse_hopper.py in_forward.py plan.py held.py)
	$(BIN)/python -m pytest -n auto tests/test_search.py -k hopper

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# -W: a warning is an error, so a dead link or a page that is in no table of contents fails. Nothing is fetched.
docs: $(VENV)/docs  ## the documentation as a site: out/docs/index.html
	$(BIN)/python -m sphinx -E -a -W --keep-going -q -d out/docs-cache docs out/docs

dist: $(VENV)/dev  ## build sdist and wheel, and use the wheel in an empty environment
	rm -rf dist $(VENV)-wheel
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/pip install -q -c constraints.txt dist/*.whl
	cd / && $(abspath $(VENV))-wheel/bin/python $(abspath tests/wheel_smoke.py)

gpu-check:  ## GPU tests and benchmark on this machine's GPU, into bench/results
	bench/gpu_check.sh

$(VENV)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	touch $@

$(VENV)/examples: $(VENV)/python pyproject.toml constraints.txt
	$(say_what_is_installed)
	$(BIN)/pip install -q -c constraints.txt -e ".[examples$(GPU)]"
	touch $@

$(VENV)/dev: $(VENV)/python pyproject.toml constraints.txt
	$(say_what_is_installed)
	$(BIN)/pip install -q -c constraints.txt -e ".[test,examples,bench,dev]"
	touch $@

$(VENV)/docs: $(VENV)/python pyproject.toml constraints.txt
	$(say_what_is_installed)
	$(BIN)/pip install -q -c constraints.txt -e ".[docs]"
	touch $@

$(VENV)/hopper: $(VENV)/python pyproject.toml constraints.txt
	$(say_what_is_installed)
	$(BIN)/pip install -q -c constraints.txt -e ".[hopper-test]"
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-wheel dist build out
