# Everything that the project can do. `make help` lists it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install reproduce test test-faults test-dashboards check bench gallery clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## make .venv and install the project with its development tools

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

reproduce: $(STAMP)  ## redraw the ViT-22B figure from real runs (about 8 minutes on two cores)
	$(BIN)/qkexp reproduce

test: $(STAMP)  ## run all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

test-faults: $(STAMP)  ## kill, damage and crowd real sweeps, and count what is lost (under 15 minutes on two cores)
	$(BIN)/python tests/faults/drill.py

test-dashboards: $(STAMP)  ## tests with a real W&B server and a real browser; installs what they need
	$(BIN)/python -m pip install --quiet --editable '.[dev,test-dashboards]'
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit; done; \
	  echo 'Chromium is missing: install the package chromium (apt-get, dnf, apk; brew on a Mac) and try again'; exit 1
	QKEXP_REQUIRE_DASHBOARDS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile tests/dashboards

check: $(STAMP)  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)  ## speed, as ratios measured side by side
	$(BIN)/python scripts/bench.py

gallery: $(STAMP)  ## docs/figures.md from the experiments and the finished sweeps under outputs
	$(BIN)/python scripts/gallery.py

clean:  ## remove the environment and caches; outputs stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
