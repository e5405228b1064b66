# make run | test | test-all | attack | zoo | fuzz | stale | results | curves | docs | lint | format | lock | horovod | gpu | gpu-report
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Two ranks, or one where torch sees exactly one GPU. Evaluated when `run` begins, after torch is installed.
RANKS  ?= $(shell $(BIN)/python -c 'import torch; print(1 if torch.cuda.device_count() == 1 else 2)')

# The index for torch alone, instead of PyPI, whose torch for Linux is built for CUDA 13:
#   make run TORCH_INDEX=https://download.pytorch.org/whl/cpu     without CUDA
#   make run TORCH_INDEX=https://download.pytorch.org/whl/cu126   GPUs before Turing, or drivers before 580
# The choice stays until it is changed, and is renewed with the lock; https://pypi.org/simple resets it.
TORCH_INDEX ?= $(shell cat $(VENV)/.torch-* 2>/dev/null)
TORCH  := $(if $(TORCH_INDEX),$(VENV)/.torch-$(notdir $(TORCH_INDEX:/=)))
PIP_INSTALL := $(BIN)/pip install --quiet --no-compile --constraint constraints.txt
PIP_INSTALL_DEV := $(PIP_INSTALL) --constraint constraints-dev.txt
# pip would compile on one core; a few files of packages are for other versions of Python.
COMPILE := $(BIN)/python -m compileall -q -j 0 $(VENV)/lib >$(VENV)/compile.log || true

# Wheels of Horovod, one for each version of torch and Python: a build takes some minutes.
HOROVOD_WHEELS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/scaling-lab/horovod

.PHONY: run test test-all attack zoo fuzz stale results curves docs lint format lock horovod gpu gpu-report

export OMP_NUM_THREADS ?= 1
# Tests start hundreds of processes, each of which would compile the lab anew.
unexport PYTHONDONTWRITEBYTECODE

run: $(VENV)/.run
	$(BIN)/torchrun --nproc-per-node $(RANKS) -m lab.train strategy=onebit model=alexnet_small steps=120

curves: $(VENV)/.run
	$(BIN)/python -m lab.sweep study=demo
	$(BIN)/python -m lab.plot runs/demo

# Without the slow ones: whole attacks, images, long sweeps, and most cases of long series of cases.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 3 --dist loadgroup -m "not slow"

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -n 3 --dist loadgroup

attack: $(VENV)/.dev
	$(BIN)/python -m tests.attack

zoo: $(VENV)/.dev
	$(BIN)/python -m tests.zoo

fuzz: $(VENV)/.dev
	$(BIN)/python -m tests.zoo fuzz num=2000 seed=0

# Pages of docs/results whose code has changed since they were measured.
stale: $(VENV)/.dev
	$(BIN)/python -m tests.support.stale

# Pages and figures of docs/results, from the records and results that lie there; minutes.
results: $(VENV)/.dev
	$(BIN)/python -m tests.support.results

# The documentation as a site, in site/. A broken link, or a page that no menu has, is an error.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.dev
	$(BIN)/mkdocs build --quiet --strict

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# constraints.txt has the versions of what users install, constraints-dev.txt those of all else that
# the tests need. Pins that still resolve stay: to renew one, delete its line. CUDA has no pins, because
# each build of torch requires its own CUDA. There are no hashes: with them pip accepts no editable install,
# and no torch but PyPI's.
LOCK := $(BIN)/uv pip compile --quiet --python $(BIN)/python --python-version 3.11 --universal \
  --no-annotate --no-header pyproject.toml
USERS := --extra report --extra wandb --extra mlflow --extra tensorboard --extra trainers --extra horovod --extra ray

lock: $(VENV)/bin/pip
	$(PIP_INSTALL_DEV) uv
	cat constraints.txt constraints-dev.txt > $(VENV)/lock.txt
	$(LOCK) --all-extras --output-file $(VENV)/lock.txt
	sed -E -i.old '/^(cuda|nvidia)-/d' $(VENV)/lock.txt
	echo '# Made by `make lock`.' | tee constraints.txt > constraints-dev.txt
	$(LOCK) $(USERS) --constraint $(VENV)/lock.txt | grep -vE '^(cuda|nvidia)-' >> constraints.txt
	awk 'NR == FNR { seen[$$1]; next } !($$1 in seen)' constraints.txt $(VENV)/lock.txt >> constraints-dev.txt

horovod: $(VENV)/.horovod

gpu: export LAB_TEST_DEVICE ?= cuda
gpu: $(VENV)/.dev
	$(BIN)/python -m pytest tests/gpu tests/unit/codec/test_kernels.py tests/unit/codec/test_gpu_kernels.py -v \
	  > gpu.log 2>&1; status=$$?; cat gpu.log; exit $$status

gpu-report: $(VENV)/.run
	$(BIN)/python -m lab.gpu_report

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python >= 3.11 is needed; name one with: make PYTHON=python3.11 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)

# This torch's dependencies come from PyPI with the rest.
$(VENV)/.torch-%: $(VENV)/bin/pip constraints.txt
	@rm -f $(VENV)/.torch-*
	$(PIP_INSTALL) --force-reinstall --no-deps --index-url $(TORCH_INDEX) torch
	@echo $(TORCH_INDEX) > $@

$(VENV)/.run: $(TORCH) $(VENV)/bin/pip pyproject.toml constraints.txt
	$(PIP_INSTALL) --editable '.[report]'
	$(COMPILE)
	@touch $@

$(VENV)/.dev: $(TORCH) $(VENV)/bin/pip pyproject.toml constraints.txt constraints-dev.txt
	$(PIP_INSTALL_DEV) --editable '.[dev,docs,report,wandb,mlflow,tensorboard,trainers,ray]'
	$(COMPILE)
	@touch $@ $(VENV)/.run

$(VENV)/.horovod: $(VENV)/.dev docker/horovod/build.sh docker/horovod/cxx17.patch
	$(PIP_INSTALL) --editable '.[horovod]'
	$(PIP_INSTALL) --force-reinstall --no-deps \
	  "$$(docker/horovod/build.sh $(abspath $(BIN))/python $(HOROVOD_WHEELS))"
	$(COMPILE)
	$(BIN)/horovodrun --check-build
	@touch $@
