# Every target sets up .venv on its own; all that must be there is Python 3.11 or newer.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# `make test TORCH=2.15.0` runs the tests with another torch, in a virtual environment of its own.
VENV := .venv$(addprefix -,$(TORCH))
BIN := $(VENV)/bin
CONSTRAINTS := $(if $(TORCH),$(VENV)/)constraints.txt
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

# One thread per process: the tests and the demo run several on few cores.
export OMP_NUM_THREADS ?= 1
# Otherwise every process of the tests would compile the package and the tests again.
unexport PYTHONDONTWRITEBYTECODE
# Nothing here downloads a model or a data set.
export HF_HUB_OFFLINE := 1

.PHONY: help demo test test-all browser zoo fuzz chaos lint format types bench accuracy docs package floors reference clean distclean

help:
	@echo "make demo      train, fine-tune with LoRA, export and reload a small model on two processes"
	@echo "make test      the default tests (test-all: the slow ones too; zoo: every architecture;"
	@echo "               fuzz: 20,000 cases of bad input for each reader; chaos: faults at every step of a run;"
	@echo "               browser: the report in Chromium, where chromium-driver is installed);"
	@echo "               TORCH=2.15.0 runs them with that version, in .venv-2.15.0"
	@echo "make lint      ruff, the floors of the house, the reference (format: apply ruff);  make types: mypy"
	@echo "make bench     the benchmarks;  make accuracy: docs/accuracy.md;  make docs: the documentation, into site/ (floors, reference: what is generated in it)"
	@echo "make package   the wheel and the sdist, into dist/; each is installed into an empty environment and used there"
	@echo "make clean     remove what these made, all but .venv (distclean: .venv too)"

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

# Torch 2.12 does not accept the pinned setuptools.
$(VENV)/constraints.txt: constraints.txt | $(BIN)/pip
	sed -e '/^setuptools==/d' -e 's/^torch==.*/torch==$(TORCH)/' $< > $@

$(VENV)/.dev: pyproject.toml $(CONSTRAINTS) | $(BIN)/pip
	@echo "Installing the packages of constraints.txt into $(VENV): a few minutes, once"
	$(INSTALL) -e '.[dev]'
	touch $@

$(VENV)/.fuzz: pyproject.toml $(CONSTRAINTS) | $(BIN)/pip
	$(INSTALL) -e '.[fuzz]'
	touch $@

$(VENV)/.docs: pyproject.toml $(CONSTRAINTS) | $(BIN)/pip
	$(INSTALL) -e '.[docs]'
	touch $@

# On CPUs, because the two processes would need two GPUs. With these: make demo CUDA_VISIBLE_DEVICES=0,1
demo: export CUDA_VISIBLE_DEVICES :=
demo: $(VENV)/.dev
	rm -rf runs/demo
	$(BIN)/composer-dist train examples/demo/english.yaml -n 2
	$(BIN)/composer-dist train examples/demo/python.yaml -n 2
	$(BIN)/python examples/demo/reload.py

test: $(VENV)/.dev
	$(BIN)/pytest -n 3 --dist worksteal

test-all: $(VENV)/.dev
	$(BIN)/pytest -n 2 --dist worksteal -m ''

browser: $(VENV)/.dev
	$(BIN)/pytest -m browser

zoo: $(VENV)/.dev
	$(BIN)/pytest -m '' tests/zoo

fuzz: $(VENV)/.dev $(VENV)/.fuzz
	FUZZ=fuzz $(BIN)/pytest -n 2 tests/behavior/test_fuzz.py --durations=0 -o faulthandler_timeout=0
	$(BIN)/python -m tests.kit.guided

# Writes the table of faults into docs/reliability.md; takes about 12 minutes on two cores.
chaos: $(VENV)/.dev
	$(BIN)/python -m tests.kit.faults --write

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/python docs/signatures.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(VENV)/.dev
	$(BIN)/mypy

bench: $(VENV)/.dev
	@set -e; for file in $(sort $(shell grep -l __main__.: benchmarks/*.py)); do \
		echo "== $$file"; $(BIN)/python $$file; \
	done
	@echo "== benchmarks/load"; $(BIN)/python -m benchmarks.load

accuracy: $(VENV)/.dev
	$(BIN)/python -m benchmarks.accuracy > $(VENV)/accuracy.md
	mv $(VENV)/accuracy.md docs/accuracy.md

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

package:
	PYTHON=$(PYTHON) .ci/package

# Draws the floors of docs/architecture.md from the imports.
floors: $(VENV)/.dev
	$(BIN)/python docs/floors.py --write

# Writes docs/reference from the docstrings.
reference: $(VENV)/.dev
	$(BIN)/python docs/signatures.py --write

clean:
	rm -rf build dist site runs .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-*
