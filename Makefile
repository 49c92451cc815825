# Set-up, demo and tests. Needs: Python >= 3.11 with venv, and make. Everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

.PHONY: demo test setup lint types clean nano-base requirements

demo: setup
	$(BIN)/astrolabe demo

test: setup
	$(BIN)/python -m pytest -n 2

setup: $(STAMP)

# Pinned names, versions and hashes; then packages whose own dependencies are not wanted; then the project itself.
$(STAMP): requirements/core.txt requirements/nodeps.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "astrolabe needs Python >= 3.11; $(PYTHON) is older. Mend: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/core.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes --no-deps -r requirements/nodeps.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $(STAMP)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# Makes the base checkpoint of the nano policy again, from its seed.
nano-base: setup
	$(BIN)/python -m jax_train.nano --out astrolabe/data/nano

# Resolves the pins again (needs uv). Addresses are never written.
requirements:
	cd requirements && uv pip compile --universal --generate-hashes --python-version 3.11 --no-emit-index-url --no-annotate --no-header --fork-strategy requires-python core.in -o core.txt
	cd requirements && uv pip compile --universal --no-deps --generate-hashes --python-version 3.11 --no-emit-index-url --no-annotate --no-header nodeps.in -o nodeps.txt

clean:
	rm -rf $(VENV) build dist *.egg-info
