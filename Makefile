# make train     the main job: a small M6 captions drawings, 4 processes on this machine; a second run resumes
# make test      style, types and the fast tests
# make test-all  the same with the slow tests
# make docs      the documentation site; make docs-serve shows it while you write
# make results   runs the benchmarks and writes the page of results
# make setup-integrations  what the slow tests of trainers, trackers and model families need; test-all does it
# make gpu-check on a host with GPUs: exactness, races, bandwidth, speed in ten minutes; writes whale-doctor.md
# PYTHON=python3.12 make setup   takes another Python

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.whale-setup
export OMP_NUM_THREADS ?= 1
# two files at a time; the tests of one file share their captured models, so they stay together (tests/conftest.py)
PYTEST_OPTIONS ?= -n 2

.PHONY: setup-integrations train test test-all setup browser lint docs docs-serve results clean gpu-check

train: setup
	$(VENV)/bin/whale run -n 4 examples/train_m6.py

test: lint
	$(VENV)/bin/python -m pytest -m "not slow" $(PYTEST_OPTIONS)

test-all: lint browser setup-integrations $(VENV)/.whale-docs
	WHALE_THOROUGH=1 $(VENV)/bin/python -m pytest $(PYTEST_OPTIONS)

# on any host with GPUs, with a build of torch that knows them: one report file to attach to an issue
gpu-check: setup
	$(VENV)/bin/whale doctor --gpu -o whale-doctor.md

# the page of a plan is tested in a real browser; without one that test is skipped and says so
browser:
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
		&& { apt-get -qq update && apt-get -qq install -y chromium; } >/dev/null 2>&1; } \
		|| echo "browser: no chromium here and apt-get cannot install it: its test will be skipped"

lint: setup
	$(VENV)/bin/ruff format --check --quiet .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Whale needs Python 3.11 or newer, $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.11 setup" % (v[0], v[1]))'
	@echo "setup: making $(VENV) with $$($(PYTHON) --version)"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "setup: installing whale and what its tests need into $(VENV) (some minutes the first time)"
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]' -c constraints.txt
	@touch $@
	@echo "setup: ready"

# the documentation site, in build/site; its pages of config, commands and results are made from the code
docs: $(VENV)/.whale-docs
	DISABLE_MKDOCS_2_WARNING=true NO_MKDOCS_2_WARNING=true $(VENV)/bin/python -m mkdocs build --strict

docs-serve: $(VENV)/.whale-docs
	$(VENV)/bin/python -m mkdocs serve

$(VENV)/.whale-docs: $(STAMP)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[docs]' -c constraints.txt
	@touch $@

# runs every benchmark of benchmarks/results.py, one after the other, on an otherwise idle machine: about an hour;
# MEASUREMENTS=DIR adds those that compare with times of real GPUs
results: setup
	$(VENV)/bin/python benchmarks/results.py $(if $(MEASUREMENTS),--measurements $(MEASUREMENTS))

# other trainers, trackers and families of models that the slow tests use; large, so not part of setup
INTEGRATIONS := $(VENV)/.whale-integrations
setup-integrations: $(INTEGRATIONS)

$(INTEGRATIONS): $(STAMP) tests/families.txt
	@echo "setup: installing trainers, trackers and model families for test-all"
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test,integrations,notebook]' -c constraints.txt
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/families.txt
	@touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print | xargs rm -rf
