# `make serve` and `make test` are all a fresh checkout needs; both make .venv first.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
PYTHON ?= $(firstword $(foreach p,python3.12 python3.13 python3.11 python3.14 python3,$(shell $(p) -c '$(SUPPORTED)' 2>/dev/null && command -v $(p))))
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp
MODEL  ?= smollm2

# MLX's Linux wheel links a reference BLAS; preloading OpenBLAS makes float32 matmul about 50 times faster.
OPENBLAS = $(firstword $(shell ls /usr/lib/*-linux-gnu/openblas-pthread/libopenblas.so.0 2>/dev/null))
APT_INSTALL = $(if $(filter 0,$(shell id -u)),,sudo -n) sh -c 'apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $(1)' >/dev/null
ifeq ($(shell uname -s),Linux)
BLAS_READY := blas
RUBY_READY := $(if $(shell command -v apt-get 2>/dev/null),ruby)
RUN = LD_PRELOAD="$(OPENBLAS)"
endif

.PHONY: all setup blas ruby serve chat check fix test test-all docs lock clean
all: test

setup: $(STAMP) $(BLAS_READY)

$(STAMP): pyproject.toml requirements/dev.lock
	@$(or $(PYTHON),false) -c '$(SUPPORTED)' 2>/dev/null \
	  || { echo 'error: $(if $(PYTHON),`$(PYTHON)` is not Python 3.11 to 3.14,no Python 3.11 to 3.14 on PATH)'; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes --only-binary :all: -r requirements/dev.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

blas:
ifeq ($(OPENBLAS),)
	@echo "installing OpenBLAS (libopenblas0-pthread)"
	@$(call APT_INSTALL,libopenblas0-pthread) \
	  || echo "warning: OpenBLAS could not be installed; the CPU backend will be slow"
endif

# What the formula's tests need.
ruby:
	@command -v ruby >/dev/null && command -v rubocop >/dev/null \
	  || { echo "installing Ruby (ruby, rubocop)"; $(call APT_INSTALL,ruby rubocop); } \
	  || echo "warning: Ruby could not be installed; the formula is not tested"

serve: setup
	$(RUN) $(BIN)/metal serve $(MODEL) $(ARGS)

chat: setup
	$(RUN) $(BIN)/metal chat $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python docs/generate.py --check

fix: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: check
	$(RUN) $(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: check $(RUBY_READY)
	$(RUN) $(BIN)/python -m pytest $(ARGS)

docs: setup
	$(BIN)/python docs/generate.py

# Needs uv. Hashes only: no index lines, so that the locks work with any mirror.
COMPILE := uv pip compile --universal --python-version 3.11 --generate-hashes \
  --no-header --no-annotate --no-emit-index-url --quiet
RUNTIME := $(COMPILE) - --no-emit-package vllm-metal --output-file src/vllm_metal/locks
lock:
	$(COMPILE) pyproject.toml --group dev --output-file requirements/dev.lock
	echo "vllm-metal @ . ; sys_platform == 'darwin' and platform_machine == 'arm64'" | $(RUNTIME)/macos-arm64.lock
	echo "vllm-metal @ . ; sys_platform == 'linux'" | $(RUNTIME)/linux.lock

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
