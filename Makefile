# Everything sets itself up in $(VENV): `make demo` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The JAX that a new $(VENV) gets, such as 0.11.2; empty: the one that constraints.txt names for this Python.
JAX ?=
CONSTRAINTS := $(if $(JAX),$(VENV)/constraints.txt,constraints.txt)
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

.PHONY: demo test test-nightly test-hopper test-jax lint docs dist gpu-check clean

demo: $(VENV)/examples  ## train a language model with cce_jax, cce_torch and full logits; out/compare_losses.png
	$(BIN)/python examples/compare_losses.py

test: $(VENV)/dev  ## all tests that need no GPU, on all cores
	$(BIN)/python -m pytest -n auto --dist worksteal

test-nightly: $(VENV)/dev  ## coverage, and more of what is drawn at random, with a new seed; every planted fault, with what caught it
	$(BIN)/python -m coverage erase
	CCE_TESTS=nightly $(BIN)/python -m coverage run -m pytest -n auto --dist worksteal
	$(BIN)/python -m coverage combine -q && $(BIN)/python -m coverage report
	CCE_TESTS=nightly PYTHONPATH=.:kernels $(BIN)/python -m tests.search --nightly --seconds 3600 --processes 2
	PYTHONPATH=.:kernels $(BIN)/python -m tests.faults --jobs 2

# Mosaic GPU has an interpreter, and XLA compiles for a GPU that is not there, from JAX 0.11 on: Python 3.12.
OF_HOPPER := hopper block_sparse_hopper in_forward plan held
test-hopper: $(VENV)/hopper  ## tests of the kernels for Hopper GPUs, interpreted, and of what programs hold on an H200
	$(BIN)/python -m pytest -n auto $(OF_HOPPER:%=tests/test_%.py)
	$(BIN)/python -m pytest -n auto tests/test_search.py -k hopper

# Not here: what test-hopper runs, and tests of PyTorch, of its libraries, of the documentation and of tools.
OF_TORCH := torch* transformers* trl* functional lazy_logits hf_example causal_sweep recipes types
OF_TOOLS := docs house faults example training bench tune sparsity
NOT_OF_JAX := $(OF_HOPPER) $(OF_TORCH) $(OF_TOOLS) search
test-jax: $(VENV)/hopper  ## the other tests of cce_jax and of the kernels
	$(BIN)/python -m pytest -n auto --dist worksteal $(NOT_OF_JAX:%=--ignore-glob='*/test_%.py') -k "not torch"
	$(BIN)/python -m pytest -n auto --dist worksteal tests/test_search.py -k "not (hopper or torch or processes)"

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
	$(VENV)-wheel/bin/pip install -q -c $(CONSTRAINTS) dist/*.whl
	cd / && $(abspath $(VENV))-wheel/bin/python $(abspath tests/wheel_smoke.py)

gpu-check:  ## GPU tests and benchmark on this machine's GPU, into bench/results
	bench/gpu_check.sh

$(VENV)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	touch $@

$(VENV)/constraints.txt: $(VENV)/python constraints.txt
	sed -E 's/^(jax|jaxlib|jax-cuda13-pjrt|jax-cuda13-plugin)==[^;]*/\1==$(JAX)/' constraints.txt > $@

$(VENV)/examples: $(VENV)/python pyproject.toml $(CONSTRAINTS)
	$(say_what_is_installed)
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e ".[examples$(GPU)]"
	touch $@

$(VENV)/dev: $(VENV)/python pyproject.toml $(CONSTRAINTS)
	$(say_what_is_installed)
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e ".[test,examples,bench,dev]"
	touch $@

$(VENV)/docs: $(VENV)/python pyproject.toml $(CONSTRAINTS)
	$(say_what_is_installed)
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e ".[docs]"
	touch $@

$(VENV)/hopper: $(VENV)/python pyproject.toml $(CONSTRAINTS)
	$(say_what_is_installed)
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e ".[hopper-test]"
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-wheel dist build out
