# Every target sets up what it needs first: a virtual environment in .venv, holding the extras of
# setup.cfg that the target uses at the versions of constraints.txt. Python >= 3.10 is all it asks for.
#   make test ARGS="-k norm"      arguments for the program behind a target
#   make test PYTHON=python3.12   the Python that a new .venv is made with

PYTHON ?= python3
ARGS ?=
VENV := .venv
PY := $(VENV)/bin/python

.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help demo test coverage bench docs lint format types doctor clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.has-train ## train the three reference models at small size and write demo/index.html
	$(PY) docs/examples/demo.py $(ARGS)

test: $(VENV)/.has-test ## run the tests
	$(PY) -m pytest -n auto --maxprocesses 8 --dist worksteal $(ARGS)

coverage: $(VENV)/.has-test ## run the tests and report the lines and branches they miss
	$(PY) -m coverage erase
	$(PY) -m coverage run -m pytest -n auto --maxprocesses 8 --dist worksteal $(ARGS)
	$(PY) -m coverage combine -q
	$(PY) -m coverage report --skip-covered --show-missing

bench: $(VENV)/.has-bench ## run the benchmarks
	$(PY) -m pytest bench -p no:xdist $(ARGS)

docs: $(VENV)/.has-docs ## build the site into site/
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict $(ARGS)

lint: $(VENV)/.has-dev ## check style and formatting
	$(PY) -m ruff check . $(ARGS)
	$(PY) -m ruff format --check .

format: $(VENV)/.has-dev ## mend what lint can mend by itself
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: $(VENV)/.has-dev $(VENV)/.has-test ## check the types
	$(PY) -m mypy $(ARGS)

doctor: $(VENV)/.has-test ## say which backends run on this machine, and why not
	$(PY) -m brickwork.kernels.backend $(ARGS)

clean: ## remove the environment and everything generated
	rm -rf $(VENV) build dist site demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	rm -rf .coverage .coverage.* *.egg-info

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "brickwork needs Python >= 3.10, and $(PYTHON) is not one; try: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$(PYTHON) could not make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

# One stamp per extra; a changed setup.cfg or constraints.txt installs again.
$(VENV)/.has-%: setup.cfg pyproject.toml constraints.txt | $(PY)
	@echo "Installing brickwork[$*] with what it needs into $(VENV) (the first time takes a few minutes)"
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]' || { \
	  echo "The packages of brickwork[$*] could not be installed (pip's message is above). They come from a" >&2; \
	  echo "package index: check the network, or point pip at another index or at a folder of wheels with" >&2; \
	  echo "PIP_INDEX_URL or PIP_FIND_LINKS; then run make again." >&2; exit 1; }
	@touch $@
