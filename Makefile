# Two commands do everything on a fresh clone:  make train  ·  make test
# They need Python >= 3.11, make and a package index. The environment is built once in .venv and reused after that.

# The first Python that runs and is new enough; a version manager's shim may exist for one that is not installed.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := .ci/pip_install.sh $(VENV) --constraint constraints.txt
# Published models of other projects that the tests run. Their packages list dependencies that the models do not use,
# so they are installed without dependencies.
MODELS := gemma google-tunix penzai ordered-set
# MaxText's trainer, from Python 3.12 on. The package itself is installed without dependencies; these are what it imports.
MAXTEXT := aqtp qwix grain omegaconf pathwaysutils tokamax drjax sympy ml-collections tensorboardX pillow tiktoken \
  datasets sentencepiece
# Servers of S3 and Google Cloud Storage on loopback, for the tests of --copy-to, without dependencies: the older versions
# that they ask for are not needed.
SERVERS := moto boto3 botocore s3transfer jmespath responses xmltodict py-partiql-parser cryptography cffi pycparser \
  flask flask-cors werkzeug itsdangerous blinker gcp-storage-emulator google-crc32c
# XLA compiles on one thread, so one worker per core. `worksteal` keeps the tests of a module on one worker, which
# shares module fixtures. On a larger machine: make test WORKERS=8.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal
# Images often set this; without bytecode every start of Halfbyte takes twice as long. It lies in $(VENV) and src.
unexport PYTHONDONTWRITEBYTECODE
ARGS   ?=
# GPU=1 (CUDA 12), GPU=cuda13, GPU=tpu, or GPU=0 for a CPU; without it CUDA 12 where there is an NVIDIA driver.
GPU    ?= $(if $(wildcard /dev/nvidiactl /dev/nvidia0 /dev/dxg),1,0)
EXTRA  := $(strip $(if $(filter 1 cuda12,$(GPU)),cuda12,$(filter cuda13 tpu,$(GPU))))
BASE   := $(VENV)/.base$(if $(EXTRA),-$(EXTRA))$(if $(LOCKED),-locked)

.PHONY: help train test test-all lint docs bench faults soak setup clean wheels
.DEFAULT_GOAL := help

help:
	@echo "make train   set up, then train a small Llama in NVFP4 on the embedded corpus (a few minutes on a laptop)"
	@echo "make test    set up, then run the fast tests (about 8 minutes on two cores)"
	@echo "make test-all  run every test; also installs torch, transformers, lm-eval and the CUDA compiler (about an hour)"
	@echo "make lint    ruff and mypy"
	@echo "make docs    the documents as a site, in build/site"
	@echo "make bench   the benchmarks that run on this machine"
	@echo "make faults  some 100 faults of more than 60 kinds against a small run, each with the outcome it must have (Linux)"
	@echo "make soak    500 steps of the demo with a fault every 20, against a run that nobody disturbs"
	@echo "make setup   the environment alone"
	@echo "make wheels  whether packages resolve for x86-64 and aarch64, CPU, CUDA 12, CUDA 13 and TPU (a dry run)"
	@echo "GPU=1        with CUDA 12 (GPU=cuda13, GPU=tpu, GPU=0); found by itself where there is an NVIDIA driver"
	@echo "LOCKED=1     every package checked against the hashes in requirements.lock"

setup: $(BASE)

train: $(BASE)
	$(BIN)/halfbyte train $(ARGS)

# CONTRIBUTING.md says which tests are slow.
test: $(VENV)/.test
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(VENV)/.test-all
	$(PYTEST) $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy

# HALFBYTE_URL=https://... is the repository that links to source files point to.
docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Ratios measured in one run. The GPU's benchmarks join in where there is one.
BENCHMARKS := benchmarks/startup.py benchmarks/quantize.py \
  $(if $(wildcard /dev/nvidiactl),benchmarks/gpu_kernels.py)

bench: $(BASE)
	@for file in $(BENCHMARKS); do echo "== $$file"; $(BIN)/python $$file $(ARGS) || exit 1; done
	$(BIN)/halfbyte bench

# Outside the trainer: processes are killed, disks filled, files and memory changed. ARGS="--kinds sigterm --times 1" for a few.
faults: $(VENV)/.test
	$(BIN)/python tests/faults/harness.py $(ARGS)

soak: $(VENV)/.test
	$(BIN)/python tests/faults/soak.py $(ARGS)

clean:
	@test ! -e $(VENV) || test -f $(VENV)/pyvenv.cfg || { echo "$(VENV) is no virtual environment; not removed"; exit 1; }
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

wheels: $(BASE)
	@$(BIN)/python .ci/wheels.py

$(BASE): pyproject.toml constraints.txt requirements.lock
	@test -n "$(PYTHON)" || { echo "Halfbyte needs Python 3.11 or later and found none; set PYTHON=/path/to/it"; exit 1; }
	@echo "setting up $(VENV) with $(PYTHON)$(if $(EXTRA), for $(EXTRA)) (about a minute, once)"
	@test -x $(BIN)/python || test ! -e $(VENV) || { echo "$(VENV) exists and is no virtual environment"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"; rm -rf $(VENV); exit 1; }
	@$(if $(LOCKED),$(subst --constraint constraints.txt,--require-hashes,$(PIP)) --requirement requirements.lock)
	@$(PIP) --editable '.$(if $(EXTRA),[$(EXTRA)])'
	@touch $@

$(VENV)/.test: $(BASE)
	@echo "adding what the tests need: pytest, hypothesis, Flax, Equinox, Haiku, Haliax, MkDocs, ruff and mypy (once)"
	@$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/.test-all: $(VENV)/.test
	@echo "adding what the slow tests need: torch, transformers, lm-eval, the CUDA compiler, servers of S3 and GCS (minutes, once)"
	@$(PIP) --editable '.[plan,interop,harness]'
	@$(PIP) --no-deps $(MODELS) $(SERVERS)
	@! $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
	  { $(PIP) $(MAXTEXT) && $(PIP) --no-deps maxtext; }
	@touch $@
