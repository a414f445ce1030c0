# Every target needs nothing but a Python of 3.11 or newer: each makes .venv first.
#
#   check   types and unit tests, under a minute: for every change
#   test    all tests but the rest of wide matrices: before a change is handed in
#   wide    the rest: each model and form at each layout, more kills
#   lint    ruff and mypy
#   fuzz    the fuzzers, for MINUTES=60, with a table of what they did
#   docs    the documentation site, in build/site
#   bench   the benchmarks, with their targets
#   dist    the packages of a release, in dist/
#   sbom    what an installed release consists of (CycloneDX), in build/sbom.cdx.json
#
#   PYTHON=...                which Python makes .venv; found by itself when not given
#   PIP_EXTRA_INDEX_URL=...   pip's own setting: an index with a CPU build of torch spares the download of CUDA

BIN := .venv/bin
INSTALLED := .venv/.installed
TORCH := torch==2.13.0
# Modules are compiled when they are first imported: of what is installed here, most never are.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

# Tests, benchmarks and the demo start many processes: each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo check test wide lint fuzz docs bench dist sbom clean

install: $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/python -m fixtures.demo

# Processes, models, networks and browsers are left out: tests/kinds.py says what is.
check: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -q -m "unit and not slow and not wide" tests/unit

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not wide"

wide: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m wide

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Coverage as a guide: `.venv/bin/python -m pip install atheris`, then `.venv/bin/python -m tests.fuzz --guided TARGET`.
MINUTES := 60
fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

docs: $(INSTALLED)
	$(PIP_INSTALL) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(INSTALLED)
	rm -rf dist
	$(PIP_INSTALL) build
	$(BIN)/python -m build

# Of a fresh environment with the package alone, so that nothing of development is in it.
RUNTIME := build/runtime/bin/python
sbom: dist
	$(BIN)/python -m venv --clear build/runtime
	$(RUNTIME) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(TORCH)
	$(RUNTIME) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/*.whl
	$(PIP_INSTALL) cyclonedx-bom
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible \
		--output-format JSON --output-file build/sbom.cdx.json $(RUNTIME)

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.convert --json build/bench.json; convert=$$?; \
	$(BIN)/python -m benchmarks.reshard --json build/bench-reshard.json; reshard=$$?; \
	$(BIN)/python -m benchmarks.export --json build/bench-export.json; export=$$?; \
	$(BIN)/python -m benchmarks.convert_experts --json build/bench-experts.json; experts=$$?; \
	$(BIN)/python -m benchmarks.plan --json build/bench-plan.json; plan=$$?; \
	$(BIN)/python -m benchmarks.quantised --json build/bench-quantised.json; quantised=$$?; \
	$(BIN)/python -m benchmarks.inspection --json build/bench-inspection.json && \
		exit $$((convert | reshard | export | experts | plan | quantised))

clean:
	rm -rf .venv build dist demo_output

# torch comes alone and first: pip then takes a local build (2.13.0+cpu) where one is offered, and nothing replaces it.
$(INSTALLED): pyproject.toml constraints.txt mcore_convert/version.py
	@test -x $(BIN)/python || { python=$$(.ci/find-python) && "$$python" -m venv .venv; }
	$(PIP_INSTALL) $(TORCH)
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@
