# `make help` lists the targets. The first one that needs it builds .venv/ (once; a few minutes, 2 GB).
#   make test ARGS="-k replay"   more arguments for pytest
#   make report PY=python        use the active interpreter (say, the conda environment) and set nothing up
#   PIP_EXTRA_INDEX_URL=…        heard by pip: on Linux, PyTorch's CPU index saves the 3 GB of its CUDA build

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: report test verify lint lab clean help env fetch lock

# Python 3.11 under whichever name it has here; evaluated only when .venv is built.
IS_311 := import sys; sys.exit(sys.version_info[:2] != (3, 11))
PYTHON ?= $(shell for p in python3.11 python3 python; do \
	"$$p" -c '$(IS_311)' 2>/dev/null && { echo "$$p"; exit; }; done; echo python3)

# One compute thread a core that we may use: affinity (nproc) and container quota (cpu.max) both count.
ifndef OMP_NUM_THREADS
OMP_NUM_THREADS := $(shell n=$$(nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 1); \
	{ read -r quota period </sys/fs/cgroup/cpu.max; } 2>/dev/null && [ "$$quota" != max ] && \
	q=$$((quota / period)) && [ $$q -lt $$n ] && n=$$((q > 0 ? q : 1)); echo $$n)
endif
export OMP_NUM_THREADS
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false
export PIP_DISABLE_PIP_VERSION_CHECK := 1

PIP_FLAGS ?= --quiet --no-compile
STRIP := --keep-id --extra-keys "metadata.papermill metadata.language_info cell.metadata.papermill"
SERVER := kitlib/cpu_engine/requirements.txt

ifeq ($(origin PY),command line)
READY :=
else
PY := .venv/bin/python
READY := .venv/.ready
endif

report: fetch  ## the whole story on the built-in lab: reports/lab/index.html
	$(PY) -m kitlib report

test: fetch  ## what CI runs
	$(PY) -m pytest -q -m "not verify" $(ARGS)

verify: fetch  ## the slow checks against the real engine; they write their tables to data/verified/
	$(PY) -m pytest -q -m verify $(ARGS)

lint: $(READY)  ## ruff, and notebooks without stored outputs
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(if $(wildcard notebooks/*.ipynb),$(PY) -m nbstripout --verify $(STRIP) notebooks/*.ipynb)

lab: fetch  ## retrain the lab's drafter (up to 90 minutes)
	$(PY) -m kitlib lab train

clean:  ## remove .venv and all caches; reports/ stays
	rm -rf .venv .cache .pytest_cache .ruff_cache .hypothesis
	find kitlib tests -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## this list
	@grep -hE '^[a-z]+:.*## ' Makefile | sed -E 's/^([a-z]+):.*## /\1|/' | \
		while IFS='|' read -r name text; do printf '  make %-8s %s\n' "$$name" "$$text"; done

env: $(READY)  ## build .venv and stop

fetch: $(READY)
	$(PY) -m kitlib lab fetch

# The stamps are touched last, so a set-up that failed is done again.
.venv/.packages: requirements.lock requirements-sglang.txt $(SERVER)
	@"$(PYTHON)" -c '$(IS_311)' || { echo "Python 3.11 is needed and $(PYTHON) is not it:" \
		"install it, or name it: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "Building .venv with $(PYTHON): once, a few minutes"
	"$(PYTHON)" -m venv --clear .venv
	.venv/bin/python -m pip install $(PIP_FLAGS) --only-binary :all: -r requirements.lock -r $(SERVER)
	.venv/bin/python -m pip install $(PIP_FLAGS) --only-binary :all: --no-deps -r requirements-sglang.txt
	@touch $@

.venv/.ready: .venv/.packages pyproject.toml
	.venv/bin/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation --editable .
	@touch $@

# Newest versions that pyproject.toml and the server's list allow, in a fresh environment; comments and order stay.
lock:  ## renew requirements.lock (run `make test` before committing it)
	rm -rf .cache/lock && "$(PYTHON)" -m venv .cache/lock
	.cache/lock/bin/python -m pip install $(PIP_FLAGS) --only-binary :all: ".[dev]" -r $(SERVER)
	.cache/lock/bin/python -m pip freeze --all --exclude pip --exclude eagle3-kit -r requirements.lock >.cache/lock/new
	sed 's/+cpu$$//' .cache/lock/new >requirements.lock
	rm -rf .cache/lock
