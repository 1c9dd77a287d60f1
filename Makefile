# Two commands matter: `make verify` shows the main job done, `make test` runs every check.
# Each makes .venv and installs what is missing there first; a second run starts at once.

PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
CONSTRAINTS := ci/constraints.txt
INSTALL := $(BIN)/python -m pip --disable-pip-version-check -qq install --constraint $(CONSTRAINTS)

NATIVE_SOURCES := CMakeLists.txt $(wildcard hal/native/* hal/*/*.cpp hal/*/*.h)
CPP_FILES := $(wildcard hal/native/*.cpp hal/native/*.h hal/*/*.cpp hal/*/*.h tests/native/*.cpp tests/native/*.h \
               tests/emulator/*.cpp tests/emulator/*.h tests/emulator/*/*.cpp tests/emulator/*/*.h)
SOURCE_VIEW := build/source-view

.DEFAULT_GOAL := help
.PHONY: help verify test pytest unit contract integrations vllm interpreted matrix lint typecheck format sanitize bench clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/:/' | column -t -s: -l2

verify: $(STAMPS)/package  ## the main job: sleep and wake a reference engine, compared bit for bit
	$(BIN)/hal verify $(ARGS)

test: lint typecheck unit contract integrations  ## every check: style, types, and all tests

pytest: $(STAMPS)/tools $(STAMPS)/package  ## the tests alone; ARGS="-k wake" narrows them
	$(BIN)/pytest $(ARGS)

unit: $(STAMPS)/tools $(STAMPS)/package  ## the tests that need no device
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile tests/unit

# The drivers' own tests count what their emulated device holds, so nothing else may use it in their process. The rest
# runs on two processes with one thread each.
contract: $(STAMPS)/tools $(STAMPS)/package  ## one suite over every platform, real and emulated, and the GPU tests
	$(BIN)/pytest tests/contract/test_*_driver.py
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile tests/contract tests/gpu --ignore-glob='*_driver.py'

integrations: $(STAMPS)/tools $(STAMPS)/package  ## real models, processes and commands
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile tests/integrations --ignore=tests/integrations/vllm

vllm: $(STAMPS)/tools $(STAMPS)/package  ## the vLLM plugin with real engines on the host, in an environment of its own
	bash ci/vllm.sh $(abspath $(BIN)/python) $(ARGS)

interpreted: $(STAMPS)/tools $(STAMPS)/package  ## the Triton kernels in Triton's interpreter, in vLLM's environment
	bash ci/interpreted.sh $(abspath $(BIN)/python) $(ARGS)

matrix: $(STAMPS)/package  ## the matrix and a soak on the host and over emulated devices
	@export PYTHON=$(abspath $(BIN)/python) OMP_NUM_THREADS=1; \
	  (bash ci/cpu.sh matrix backups soak && OUT=build/emulated-xpu bash ci/emulated.sh xpu) & host=$$!; \
	  bash ci/emulated.sh cuda rocm; emulated=$$?; wait $$host && exit $$emulated

lint: $(STAMPS)/tools  ## style of Python and C++
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

# hal and core are two folders of one package: types are checked on a tree that has them together.
typecheck: $(STAMPS)/tools  ## mypy --strict on hal and hal.core
	@rm -rf $(SOURCE_VIEW) && mkdir -p $(SOURCE_VIEW)/hal
	@ln -s $(filter-out %/native %/__pycache__,$(abspath $(wildcard hal/*) core)) $(SOURCE_VIEW)/hal/
	cd $(SOURCE_VIEW) && $(abspath $(BIN)/mypy) --config-file $(abspath pyproject.toml) \
	  --cache-dir $(abspath .mypy_cache) --package hal

format: $(STAMPS)/tools  ## rewrite Python and C++ in the house's style
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

sanitize: $(STAMPS)/build  ## the native tests under ASan, UBSan and TSan
	PATH="$(abspath $(BIN)):$$PATH" bash ci/sanitize.sh

bench: $(STAMPS)/tools $(STAMPS)/package  ## rates against memcpy, and 1,000 cycles
	$(BIN)/python bench/transfer.py
	$(BIN)/python bench/cycles.py

clean:  ## remove the environment and everything that was built
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- what the targets above stand on -----------------------------------------------------------------------------

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# The build runs in this environment, so that a changed source file rebuilds in seconds; cmake and ninja are
# installed only where the machine has none that serve.
$(STAMPS)/build: $(STAMPS)/venv pyproject.toml $(CONSTRAINTS)
	@$(INSTALL) scikit-build-core
	@needs="$$($(BIN)/python -c 'from scikit_build_core.build import get_requires_for_build_editable as needs; print(*needs())')"; \
	  [ -z "$$needs" ] || $(INSTALL) $$needs
	@touch $@

$(STAMPS)/package: $(STAMPS)/build $(NATIVE_SOURCES)
	@echo "installing hal and what it needs (the first time takes minutes: torch is large)"
	@$(INSTALL) --no-build-isolation --editable . numpy  # torch warns where there is no numpy
	@touch $@

$(STAMPS)/tools: $(STAMPS)/build | $(STAMPS)/package
	@echo "installing the tools and packages that the tests need"
	@$(INSTALL) --no-build-isolation --editable '.[test,dev]'
	@touch $@
