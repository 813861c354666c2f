# kvlab: `make` lists what there is. PROFILE= chooses the profile, RUN= a run folder.
PROFILE ?= embedded
RUN ?=
SWEEP ?= embedded-8
PYTHON ?= python3
IMAGE ?= kvlab-engine-cpu:1
BASE ?= python:3.11-slim-bookworm
BIN := .venv/bin
KVLAB := $(BIN)/kvlab
.DEFAULT_GOAL := help
.PHONY: help env engine image check test test-fast smoke reproduce batch report lab docs lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14
	@echo 'variables: PROFILE=$(PROFILE) RUN=$(RUN) SWEEP=$(SWEEP)'

env: .venv/.stamp ## set up the lab environment (.venv), again only when its lock changed

.venv/.stamp: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvlab needs Python 3.11 or newer; set PYTHON=")'
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

engine: env ## set up the engine environment (.venv-engine): vLLM CPU and LMCache
	$(BIN)/python -m kvlab.environment engine

image: ## build the embedded engine as a container image, on BASE
	docker build --network host --build-arg BASE=$(BASE) --tag $(IMAGE) \
		--file docker/engine-cpu.Dockerfile .

check: env ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: engine ## set everything up and run every test
	$(BIN)/pytest

test-fast: env ## the tests that need no engine, no container and no browser
	$(BIN)/pytest -m 'not engine and not docker and not browser'

smoke: engine ## one repeat of the A/B on the embedded engine
	$(KVLAB) run two-round smoke

reproduce: $(if $(filter dgx-spark,$(PROFILE)),env,engine) $(if $(filter embedded-docker,$(PROFILE)),image) ## run every experiment on PROFILE and write the reports
	$(KVLAB) reproduce $(PROFILE)

batch: engine ## measure every cell of SWEEP
	$(KVLAB) batch $(SWEEP)

report: env ## render the reports of RUN again
	$(KVLAB) report $(RUN)

lab: engine ## open the notebooks in JupyterLab
	KVLAB_HOME=$(CURDIR) $(BIN)/jupyter lab notebooks

docs: env ## make docs/preflight.md from its rules, and check that the documentation is complete
	$(BIN)/python -m kvlab.preflight.page docs/preflight.md
	$(BIN)/pytest -q tests/test_docs.py

lock: ## resolve the lab's dependencies anew and write requirements.lock
	rm -rf .venv-lock && $(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install --quiet hatchling editables '.[dev]'
	.venv-lock/bin/pip freeze --exclude kvlab > requirements.lock
	rm -rf .venv-lock

clean: ## remove what runs left behind, but no run and no report
	-$(KVLAB) clean
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
