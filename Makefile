# Needs Python 3.11+, make and a C compiler; everything else goes into .venv. `make help` lists the targets.
PYTHON ?= python3
export PYTHON
# Some systems have bash as /bin/sh, which would expand the braces of ARGS="data.sources.a={weight:2,loss_coef:1}".
SHELL := bash
.SHELLFLAGS := +B -c

VENV  := .venv
PY    := $(VENV)/bin/python
STAMP := $(VENV)/.installed
DEV   := $(VENV)/.installed-dev
# Of the plugins that come with libraries only those the tests use: to load the others takes a second.
PYTEST := $(PY) -m pytest --disable-plugin-autoload -p xdist -p timeout -p hypothesispytest

# Whole runs come last.
SLOW := tests/unit $(addprefix tests/system/,rollout weight_sync trainer scripts) tests/cluster tests/system/runs

.DEFAULT_GOAL := help
.PHONY: help install install-cluster train sft evaluate serve dashboard retriever predict test test-slow test-nightly unit gpu-check lint docs clean distclean FORCE

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo '  ARGS="..."                 passed on: make train ARGS="trainer.lr=1e-4 rollout.num_replicas=2"'
	@echo '  PYTHON=python3.12          the interpreter a new .venv is made with (3.11 or newer)'
	@echo '  SLIPSTREAM_EXTRA=cpu|gpu   which vLLM .venv gets (default: gpu where nvidia-smi lists a GPU)'

install: $(STAMP)  ## make .venv, or bring it up to date

# Written last by install.sh, so that a half-finished install does not count. A named extra is always compared with what is there.
$(STAMP): pyproject.toml constraints.txt scripts/install.sh $(if $(SLIPSTREAM_EXTRA),FORCE)
	@bash scripts/install.sh

# Tests and linters need more packages than a training does.
$(VENV)/.installed-%: pyproject.toml constraints.txt scripts/install.sh $(if $(SLIPSTREAM_EXTRA),FORCE)
	@bash scripts/install.sh $*

install-cluster: $(VENV)/.installed-cluster  ## the same with what `ray job submit` and KubeRay need

train: $(STAMP)  ## train: one command, one machine
	@$(PY) -m scripts.train $(ARGS)

sft: $(STAMP)  ## train a model on conversations, by supervised fine-tuning: make sft ARGS="sft.train_files=FILE"
	@$(PY) -m scripts.sft $(ARGS)

evaluate: $(STAMP)  ## evaluate a model: make evaluate ARGS="runs/latest"
	@$(PY) -m scripts.evaluate $(ARGS)

serve: $(STAMP)  ## serve a model over HTTP, as OpenAI does, until Ctrl-C
	@$(PY) -m scripts.serve $(ARGS)

dashboard: $(STAMP)  ## show the newest run in a browser, live: make dashboard ARGS="run=FOLDER"
	@$(PY) -m scripts.dashboard $(ARGS)

retriever: $(STAMP)  ## serve the documents of a corpus to search: make retriever ARGS="corpus=FOLDER"
	@$(PY) -m scripts.retriever $(ARGS)

predict: $(STAMP)  ## predict other configurations of a run, and say what to change: make predict ARGS="run=runs/latest"
	@$(PY) -m scripts.predict $(ARGS)

test: $(DEV)  ## unit and system tests
	@$(PYTEST) tests/system tests/unit -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not nightly" $(ARGS)

test-slow: $(DEV)  ## the tests that take longer: engines, resume, faults, clusters, fleets, recipes
	@$(PYTEST) $(SLOW) -n 2 --dist loadfile --no-loadscope-reorder -m "slow and not nightly" $(ARGS)

test-nightly: $(DEV)  ## the tests that take longest: fault after fault, learning, partitions of a minute
	@$(PYTEST) tests/unit tests/cluster tests/system -n 2 --dist loadfile --no-loadscope-reorder -m nightly $(ARGS)

unit: $(DEV)  ## unit tests only: a minute or two
	@$(PYTEST) tests/unit -n 2 --dist worksteal -m "not slow and not nightly" $(ARGS)

gpu-check: $(DEV)  ## check everything on one GPU, in less than nine minutes a call
	@$(PY) -m scripts.bench.gpu $(ARGS)

lint: $(DEV)  ## ruff check, ruff format --check, pyright
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m pyright

docs: $(STAMP)  ## write the tables of keys and of metrics in docs
	@$(PY) -m scripts.docs

clean:  ## remove caches and build artefacts; .venv and runs/ stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## clean, and remove .venv
	rm -rf $(VENV)
