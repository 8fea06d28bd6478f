# Works on a machine with Python alone: everything is installed into .venv with pip.
PYTHON ?= python3
JOBS ?= 3
MINUTES ?= 5
BIN := .venv/bin

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# What is imported is compiled once, not by every process anew; pip need not compile what nobody imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test test-fast test-all test-cluster fuzz lint format docs docs-serve reference peers bench-loss bench-input bench-features bench-train clean

# Trains on drawn scenes and evaluates. Each call is a run of its own under runs/.
quickstart: .venv/.installed
	$(BIN)/clipstream train --config configs/quickstart.yaml

# The lines before the last say what took longest and what was skipped.
test: .venv/.installed-dev
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --durations=15

# The tests that start no process, in under two minutes.
test-fast: .venv/.installed-dev
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m 'unit and not slow and not ci'

# The slow tests too: quickstart's figures, whole runs, all pairs of settings, the wheel, the pages' commands.
test-all: .venv/.installed-dev
	$(BIN)/python -m pytest -q -m ''

# The property tests with examples that are drawn anew, for MINUTES. Each pass prints its seed; SEED=N repeats it.
fuzz: .venv/.installed-dev
	$(BIN)/python -m tests.support.fuzz $(MINUTES) $(SEED)

# Clusters of this machine, which the tests start: the batch scripts of docs/distributed.md on a real Slurm (Debian's
# slurm-wlm and munge), faults on two hosts that are network namespaces (root; half an hour), and executors on Ray and
# Dask.
test-cluster: .venv/.installed-dev
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[ray,dask]'
	$(BIN)/python -m pytest -v -m '' tests/distributed/test_slurm.py tests/distributed/test_hosts.py \
		tests/distributed/test_executors.py

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_repository.py

# The documentation as a site that needs no network: build/site/index.html. A broken link or reference is an error.
docs: .venv/.installed-dev
	$(BIN)/python docs/generate.py build/docs
	$(BIN)/zensical build --strict --clean

docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8000

# The losses beside open_clip's; the table as CSV and plot under build/.
bench-loss: .venv/.installed-dev
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[bench]'
	mkdir -p build
	$(BIN)/python benchmarks/loss.py --csv build/loss.csv --plot build/loss.svg

# The settings of training one after the other on a small model and generated data, beside open_clip's step; the table as
# CSV and the settings to use under build/.
bench-train: .venv/.installed-dev
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[bench]'
	mkdir -p build
	$(BIN)/python -m clipstream bench train --model small --batch-size 128 --against open_clip \
		--csv build/train.csv --yaml build/train.yaml
	$(BIN)/python -m clipstream bench train --model small-vit --batch-size 64 --against open_clip \
		--rungs fused,buckets,checkpointing,micro-batch,patch-dropout \
		--csv build/train-vit.csv --yaml build/train-vit.yaml

# Stores of features: speed, memory and accuracy of a store, the verb beside a bare loop of its tower, and training from a
# store beside training with the tower live.
bench-features: .venv/.installed-dev
	$(BIN)/python benchmarks/features.py
	$(BIN)/python benchmarks/precompute.py --rounds 5
	mkdir -p build/made
	cd benchmarks && ../$(BIN)/python -c "import pathlib, made; p = pathlib.Path('../build/made/jpeg-512'); p.exists() or made.make('jpeg-512', p)"
	$(BIN)/python benchmarks/stored_lit.py build/made/jpeg-512/00000.tar

# Figures on Fashion-MNIST (Debian's dataset-fashion-mnist) beside those of clip-benchmark's own code, which works with
# no later numpy.
reference: .venv/.installed-dev build/reference
	PYTHONPATH="$(CURDIR)/build/reference" $(BIN)/python -m pytest -q -m slow tests/evals/test_clip_benchmark.py \
		tests/evals/test_choice.py

build/reference: | .venv/.installed-dev
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --target $@.part \
		clip-benchmark==1.6.2 'numpy<2.4' requests urllib3 idna certifi charset-normalizer
	mv $@.part $@

# What open_clip's trainer needs beside this environment: it works with no later webdataset.
peers: build/peers build/spdl

build/peers: | .venv/.installed-dev
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --target $@.part \
		webdataset==0.2.86 pandas python-dateutil pytz tzdata six
	mv $@.part $@

build/spdl: | .venv/.installed-dev
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --target $@.part spdl spdl-core spdl-io
	mv $@.part $@

# The input path beside open_clip's; the table as CSV and plot under build/.
bench-input: .venv/.installed-dev build/peers build/spdl
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[bench]'
	$(BIN)/python benchmarks/input.py --csv build/input.csv --plot build/input.svg

format: .venv/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --no-compile --editable .
	touch $@

.venv/.installed-dev: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[dev]'
	touch .venv/.installed $@
