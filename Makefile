# make run | test | curves | lint | format | horovod | gpu | gpu-first-hour
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Two ranks, or one where the machine has exactly one GPU.
RANKS  ?= $(shell [ "$$(nvidia-smi -L 2>/dev/null | wc -l)" = 1 ] && echo 1 || echo 2)

# Wheels of Horovod, one for each version of torch and Python: a build takes some minutes.
HOROVOD_WHEELS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/scaling-lab/horovod

.PHONY: run test curves lint format horovod gpu gpu-first-hour

export OMP_NUM_THREADS ?= 1

run: $(VENV)/.run
	$(BIN)/torchrun --nproc-per-node $(RANKS) -m lab.train strategy=onebit

curves: $(VENV)/.run
	$(BIN)/python -m lab.sweep study=demo
	$(BIN)/python -m lab.plot runs/demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not alone"
	$(BIN)/python -m pytest -m alone

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

horovod: $(VENV)/.horovod

gpu: export LAB_TEST_DEVICE ?= cuda
gpu: $(VENV)/.dev
	$(BIN)/python -m pytest tests/gpu tests/unit/test_codec.py -v > gpu.log 2>&1; status=$$?; cat gpu.log; exit $$status

gpu-first-hour: $(VENV)/.dev
	$(BIN)/python -m lab.first_hour

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python >= 3.11 is needed; name one with: make PYTHON=python3.11 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(VENV)/bin/pip pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/bin/pip pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,wandb]'
	@touch $@ $(VENV)/.run

$(VENV)/.horovod: $(VENV)/.dev docker/horovod/build.sh docker/horovod/cxx17.patch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[horovod]'
	$(BIN)/pip install --quiet --constraint constraints.txt --force-reinstall --no-deps \
	  "$$(docker/horovod/build.sh $(abspath $(BIN))/python $(HOROVOD_WHEELS))"
	$(BIN)/horovodrun --check-build
	@touch $@
