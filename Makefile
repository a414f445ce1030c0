# `make test`, `make demo`, `make lint` and `make bench` need nothing but a Python of 3.11 or newer: each makes .venv first.
#
#   PYTHON=...                which Python makes .venv; found by itself when not given
#   PIP_EXTRA_INDEX_URL=...   pip's own setting: an index with a CPU build of torch spares the download of CUDA

BIN := .venv/bin
INSTALLED := .venv/.installed
TORCH := torch==2.13.0
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: install demo test lint bench clean

install: $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/python -m fixtures.demo

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.convert --json build/bench.json; convert=$$?; \
	$(BIN)/python -m benchmarks.reshard --json build/bench-reshard.json; reshard=$$?; \
	$(BIN)/python -m benchmarks.export --json build/bench-export.json; export=$$?; \
	$(BIN)/python -m benchmarks.look --json build/bench-look.json && exit $$((convert | reshard | export))

clean:
	rm -rf .venv build dist demo_output

# torch comes alone and first: pip then takes a local build (2.13.0+cpu) where one is offered, and nothing replaces it.
$(INSTALLED): pyproject.toml constraints.txt mcore_convert/version.py
	@test -x $(BIN)/python || { python=$$(.ci/find-python) && "$$python" -m venv .venv; }
	$(PIP_INSTALL) $(TORCH)
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@
