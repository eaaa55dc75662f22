# `make demo` and `make test` work as the first and only command after a clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed

.PHONY: demo test quick faults check bench docs notebooks test-oldest clean

demo: $(READY)
	$(BIN)/vitrail demo

test: check
	$(BIN)/pytest -n 2 --dist worksteal

quick: $(READY)
	$(BIN)/pytest -n 2 -m "not slow"

# kills, full disks, flipped bits, hostile files, each many times: minutes, and a table
faults: $(READY)
	VITRAIL_FAULTS=full $(BIN)/pytest -n 2 tests/faults
	VITRAIL_FAULTS=full $(BIN)/pytest -n 2 -m full

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -n 2

bench: .venv-bench/.installed
	.venv-bench/bin/python -m bench

# the site with its reference and the book: build/site/index.html opens without a server
docs: $(READY)
	$(BIN)/python -m docs.build

# every chapter as a notebook in build/notebooks, each executed
notebooks: $(READY)
	$(BIN)/python -m book.notebooks --execute

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Vitrail needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# The peers have their own environment: an installed but broken torchvision breaks other packages.
.venv-bench/.installed: pyproject.toml constraints.txt bench/requirements.txt bench/peers.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fast,serve]' -r bench/requirements.txt
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r bench/peers.txt
	touch $@

# the oldest versions that pyproject.toml allows, and the quick tests with them
test-oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python tests/oldest.py > .venv-oldest/oldest.txt
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-oldest/oldest.txt -e '.[dev]'
	.venv-oldest/bin/pytest -n 2 -m "not slow"

clean:
	rm -rf $(VENV) .venv-bench .venv-oldest build dist
