# Every target sets up what it needs first: a virtual environment in .venv, holding the extras of
# setup.cfg that the target uses at the versions of constraints.txt. Python >= 3.10 is all it asks for.
#   make test ARGS="-k norm"      arguments for the program behind a target
#   make bench BENCH=bench/test_ssd_scan.py   some of the benchmarks
#   make test PYTHON=python3.12   the Python that a new .venv is made with

PYTHON ?= python3
ARGS ?=
BENCH ?= bench
VENV := .venv
PY := $(VENV)/bin/python
VENDOR := .venv-vendor
TRANSFORMERS ?= 5.17
OTHER := .venv-transformers

.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help demo test test-triton triton-report test-gpu-bench test-vendor test-transformers test-export coverage bench docs lint format types doctor ext clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.has-train ## train the three reference models at small size and write demo/index.html
	OMP_WAIT_POLICY=PASSIVE $(PY) docs/examples/demo.py $(ARGS)

test: $(VENV)/.has-test ## run the tests
	$(PY) -m pytest -n auto --maxprocesses 8 --dist worksteal $(ARGS)

test-triton: $(VENV)/.has-test ## check the Triton kernels without a GPU: interpreted, sanitized, compiled for four chips
	TRITON_INTERPRET=1 $(PY) -m pytest tests/triton/interpreted -n auto --maxprocesses 8 --dist worksteal $(ARGS)
	TRITON_CACHE_DIR=build/triton $(PY) -m pytest tests/triton/compiled -n auto --maxprocesses 8 --dist worksteal $(ARGS)

triton-report: $(VENV)/.has-test ## print what every configuration of the Triton kernels takes on four chips
	TRITON_CACHE_DIR=build/triton $(PY) bench/resources.py

test-gpu-bench: $(VENV)/.has-test ## rehearse bench/gpu.sh on the CPU
	$(PY) -m pytest tests/triton/rehearsed -n auto --maxprocesses 8 --dist worksteal $(ARGS)

test-vendor: $(VENV)/.has-test $(VENDOR)/.ready ## test against the real mamba-ssm and causal-conv1d, and by transformers' own tests (docs/vendor_tests.md)
	BRICKWORK_VENDOR=$(VENDOR) $(PY) -m pytest tests/vendor -n auto --maxprocesses 8 --dist worksteal $(ARGS)

# Without constraints.txt, whose pins are of another transformers.
test-transformers: $(VENV)/.has-test ## test the adapter against another transformers: make test-transformers TRANSFORMERS=5.17
	rm -rf $(OTHER)
	$(PY) -m pip install --quiet --disable-pip-version-check --target $(OTHER) "transformers==$(TRANSFORMERS).*"
	PYTHONPATH=$(OTHER) $(PY) -m pytest $(wildcard tests/assemblies/test_hf*.py) -n auto --maxprocesses 8 --dist worksteal $(ARGS)

test-export: $(VENV)/.has-test ## export and compile every assembly with every option: many minutes (docs/interoperability.md)
	BRICKWORK_EXPORTS=1 $(PY) -m pytest tests/exported -n auto --maxprocesses 8 --dist worksteal $(ARGS)

coverage: $(VENV)/.has-test ## run the tests and report the lines and branches they miss
	$(PY) -m coverage erase
	$(PY) -m coverage run -m pytest -n auto --maxprocesses 8 --dist worksteal $(ARGS)
	$(PY) -m coverage combine -q
	$(PY) -m coverage report --skip-covered --show-missing

# glibc maps large blocks anew at every call and fills them with zeros page by page, which slows every
# side by a factor that depends on its sizes; the report names this setting.
bench: $(VENV)/.has-bench $(VENDOR)/.ready ## run the benchmarks
	GLIBC_TUNABLES=glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=34359738368 BRICKWORK_VENDOR=$(VENDOR) $(PY) -m pytest $(BENCH) -p no:xdist $(ARGS)

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

ext: $(VENV)/.has-test ## compile the CPU kernels ahead of their first use
	$(PY) -m brickwork.kernels.cpu_extension

clean: ## remove the environment and everything generated
	rm -rf $(VENV) $(VENDOR) $(OTHER) build dist site demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
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

# Neither package installs from the index on a machine without CUDA; these options build them without
# their kernels, and without pip's cache, which would hand such a wheel to a machine with CUDA later.
WITHOUT_KERNELS := MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE CAUSAL_CONV1D_FORCE_BUILD=TRUE
AS_SOURCE := --quiet --disable-pip-version-check --no-build-isolation --no-deps --no-cache-dir -c constraints.txt

$(VENDOR)/.ready: constraints.txt | $(VENV)/.has-test
	@echo "Installing mamba-ssm and causal-conv1d into $(VENDOR), with the latter's own tests and transformers'"
	@rm -rf $(VENDOR) && mkdir $(VENDOR)
	@$(WITHOUT_KERNELS) $(PY) -m pip install $(AS_SOURCE) --target $(VENDOR) mamba-ssm causal-conv1d
	@$(WITHOUT_KERNELS) $(PY) -m pip download $(AS_SOURCE) --no-binary :all: --dest $(VENDOR)/sources causal-conv1d
	@tar -xzf $(VENDOR)/sources/causal_conv1d-*.tar.gz -C $(VENDOR)/sources --strip-components 1
	@$(PY) -m pip download $(AS_SOURCE) --no-binary :all: --dest $(VENDOR)/sources transformers
	@mkdir $(VENDOR)/sources/transformers && tar -xzf $(VENDOR)/sources/transformers-*.tar.gz -C $(VENDOR)/sources/transformers --strip-components 1
	@$(PY) -m pip install $(AS_SOURCE) --target $(VENDOR) parameterized
	@touch $@
