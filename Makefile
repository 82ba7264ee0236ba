# Everything runs in .venv, made here from nothing but python3.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# nixl-cu12 declares torch as a dependency; host memory needs none of what it pulls in.
NIXL ?= nixl-cu12==1.5.1
# On Python 3.11 here this is a CPU build; elsewhere it may be a CUDA build of several GB. `make test TORCH=` goes without.
TORCH ?= torch==2.13.0
# How many tests run at once.
JOBS ?= 2

.PHONY: demo test test-libfabric test-vllm test-vllm-pair test-vllm-neuron test-triton test-xpu contract check lint types unit walk bench clean help

help:
	@echo "make demo    install what the demo needs into $(VENV) and run it"
	@echo "make test    install what the tests need and run every check: ruff, mypy, pytest"
	@echo "make check   the checks without installing anything"
	@echo "make test-libfabric   the faults over NIXL's LIBFABRIC backend (root, Debian)"
	@echo "make test-triton      the GPU's copying kernels, in Triton's interpreter"
	@echo "make test-vllm        the connector under vLLM's scheduler, and with the router in real servers, on CPU"
	@echo "make test-vllm-pair   the part of it with one pair of servers"
	@echo "make test-vllm-neuron the connector on Trainium: a fake device under vLLM's scheduler"
	@echo "make test-xpu         the example plug-in, installed beside the environment"
	@echo "make contract         which memory backend keeps which part of the contract here"
	@echo "make walk    walk every joint state of the protocol and print what was seen"
	@echo "make bench   measure handover, planning, shapes of blocks and serving here; figures in $(VENV)/bench"
	@echo "make clean   remove $(VENV) and caches"

demo: $(VENV)/.demo
	$(BIN)/pushkv demo

test: $(VENV)/.test
	$(MAKE) check

# NIXL's LIBFABRIC backend, with provider tcp: 220 MB of an older NIXL and what it takes, beside the environment.
test-libfabric: $(VENV)/.test
	$(BIN)/python tests/faults/libfabric.py $(VENV)/libfabric
	PUSHKV_LIBFABRIC=$(abspath $(VENV)/libfabric) $(BIN)/python -m pytest -n $(JOBS) tests/faults/test_libfabric.py tests/faults/test_libfabric_doctor.py

# End to end with vLLM's CPU build, in an environment of its own of 4 GB (Python 3.11).
VLLM := $(VENV)/vllm

test-vllm:
	$(PYTHON) plugins/pushkv-vllm/tests/e2e/environment.py $(VLLM)
	cd plugins/pushkv-vllm && $(abspath $(VLLM))/bin/python -m pytest tests/connector -n $(JOBS)
	cd plugins/pushkv-vllm && $(abspath $(VLLM))/bin/python -m pytest tests/e2e
	$(MAKE) test-vllm-neuron

# The part of it with one pair of servers.
test-vllm-pair:
	$(PYTHON) plugins/pushkv-vllm/tests/e2e/environment.py $(VLLM)
	cd plugins/pushkv-vllm && $(abspath $(VLLM))/bin/python -m pytest tests/connector -n $(JOBS)
	cd plugins/pushkv-vllm && $(abspath $(VLLM))/bin/python -m pytest tests/e2e/test_e2e_push.py

# The connector on Trainium, on the fake device and vLLM's own scheduler, in the same environment.
NEURON := plugins/pushkv-vllm-neuron

test-vllm-neuron:
	$(PYTHON) plugins/pushkv-vllm/tests/e2e/environment.py $(VLLM)
	$(VLLM)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -e $(NEURON)
	cd $(NEURON) && $(abspath $(VLLM))/bin/python -m pytest tests

# A plug-in is installed into a folder of its own: in the environment itself every other test would find it too.
XPU := $(VENV)/plugins/xpu

test-xpu: $(XPU)/.installed
	PYTHONPATH=$(abspath $(XPU)) $(BIN)/python -m pytest plugins/pushkv-xpu/tests
	MYPYPATH=plugins/pushkv-xpu/src $(BIN)/mypy -p pushkv_xpu

# The GPU's kernels in Triton's interpreter, which needs no GPU: 290 MB beside the environment.
TRITON := $(VENV)/triton

test-triton: $(TRITON)/.installed
	TRITON_INTERPRET=1 PYTHONPATH=$(abspath $(TRITON)) $(BIN)/python -m pytest tests/backends/test_packing.py -k kernel

$(TRITON)/.installed: $(VENV)/.test
	rm -rf $(TRITON)
	$(PIP) install --quiet --no-deps --target $(TRITON) triton==3.9.0
	touch $@

contract: $(XPU)/.installed
	PYTHONPATH=$(abspath $(XPU)) $(BIN)/python -m pushkv.testing.backend_contract

$(XPU)/.installed: $(VENV)/.test $(wildcard plugins/pushkv-xpu/src/pushkv_xpu/*.py) plugins/pushkv-xpu/pyproject.toml
	rm -rf $(XPU)
	$(PIP) install --quiet --no-deps --target $(XPU) plugins/pushkv-xpu
	touch $@

check: lint types unit

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

# The fake Neuron device cannot be uninstalled from a process, so its tests are a run of their own. They need torch.
unit:
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal
	$(if $(TORCH),$(BIN)/python -m pytest -n $(JOBS) tests/neuron $(NEURON)/tests/test_neuron_requirements.py)

walk: $(VENV)/.test
	PYTHONPATH=tests $(BIN)/python -m walk

bench: $(VENV)/.test
	$(BIN)/pushkv bench handover --plot $(VENV)/bench
	$(BIN)/python benchmarks/plan.py
	$(BIN)/pushkv bench descriptors --plot $(VENV)/bench
	$(BIN)/pushkv bench serve --plot $(VENV)/bench

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml Makefile | $(BIN)/python
	$(PIP) install --quiet --no-deps $(NIXL)
	$(PIP) install --quiet -e .
	touch $@

$(VENV)/.test: $(VENV)/.demo plugins/pushkv-vllm/pyproject.toml
	$(PIP) install --quiet -e '.[test]'
	$(PIP) install --quiet -e 'plugins/pushkv-vllm[router]'
	$(if $(TORCH),$(PIP) install --quiet $(TORCH))
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
