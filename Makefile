SHELL := bash
.SHELLFLAGS := -o pipefail -c

# Two commands are enough: `make run` trains a model end to end on this machine's CPU, `make test` checks everything.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
GPU_PYTHON ?= python3.12
GPU_VENV ?= .venv-gpu
GPU_BIN := $(GPU_VENV)/bin
COMMA := ,
GPUS ?= $(if $(CUDA_VISIBLE_DEVICES),$(words $(subst $(COMMA), ,$(CUDA_VISIBLE_DEVICES))),$(shell nvidia-smi --list-gpus 2>/dev/null | wc -l))
# Some containers set this. Tests start hundreds of processes, and each would compile the same modules again.
unexport PYTHONDONTWRITEBYTECODE
PROTOS := $(sort $(shell find protos -name '*.proto'))

.PHONY: setup run setup-gpu run-gpu test test-fast test-runs test-light test-parts test-long test-compose test-kubernetes test-slurm docs lint protos bench clean

setup: $(VENV)/.installed

$(VENV)/.installed: requirements/cpu.txt pyproject.toml deploy/setup.sh
	@PYTHON=$(PYTHON) VENV=$(VENV) bash deploy/setup.sh
	@touch $@

run: setup
	$(BIN)/lockstep data arithmetic
	$(BIN)/lockstep run deploy/runs/quickstart.yaml name=quickstart-$$(date +%Y%m%d-%H%M%S)

# A host that cannot compile the package runs all other tests, and tries again the next time.
$(VENV)/.suffix: requirements/suffix.txt requirements/suffix-build.txt deploy/setup_suffix.sh | setup
	-@VENV=$(VENV) bash deploy/setup_suffix.sh && touch $@

setup-gpu: $(GPU_VENV)/.installed

$(GPU_VENV)/.installed: requirements/gpu.txt pyproject.toml deploy/setup_gpu.sh
	@PYTHON=$(GPU_PYTHON) VENV=$(GPU_VENV) bash deploy/setup_gpu.sh
	@touch $@

data/larger/model.safetensors: | setup-gpu
	$(GPU_BIN)/python -m deploy.quickstart.make_model data/larger --hidden-size 512 --num-layers 8 trainer.optim.lr=5e-4

# On GPUS GPUs of this host, each of which has a trainer rank and an engine: by default those in CUDA_VISIBLE_DEVICES, or
# all if it is not set.
run-gpu: setup-gpu data/larger/model.safetensors
	$(GPU_BIN)/lockstep data arithmetic
	$(GPU_BIN)/lockstep run deploy/runs/gpu.yaml trainer.num_ranks=$(GPUS) rollout.num_replicas=$(GPUS) \
	  name=gpu-$$(date +%Y%m%d-%H%M%S)

# Three at a time: services that wait for one another to start leave time for the others. sed keeps lines whole.
test: setup
	@$(MAKE) --no-print-directory --jobs=3 --keep-going test-runs test-parts lint test-light

# RUNS, where one trainer and two replicas are lent to most tests, LIGHT with lint before it, and all others take about
# the same time.
RUNS := tests/agents tests/deploy tests/e2e tests/fault tests/model tests/rollout tests/trainer/ranks
LIGHT := tests/common tests/coordinator tests/reward

# Everything that starts no engine and no trainer ranks.
test-fast: setup
	@$(BIN)/python -m pytest tests/common tests/compat tests/coordinator tests/test_docs.py tests/test_source.py -m 'not slow'

test-runs: $(VENV)/.suffix
	@$(BIN)/python -m pytest $(RUNS) 2>&1 | sed -u ''

test-light: setup
	@$(BIN)/python -m pytest $(LIGHT) 2>&1 | sed -u ''

test-parts: $(VENV)/.suffix
	@$(BIN)/python -m pytest $(patsubst %,--ignore=%,$(RUNS) $(LIGHT)) 2>&1 | sed -u ''

# Whole runs that are disturbed for minutes, and what repeats for other layouts, models and faults what make test checks
# for some. CI leaves them out.
test-long: setup
	@$(BIN)/python -m pytest tests -m long

# The deployments of docs/deployment.md, as root on Debian: minutes and gigabytes each. KEEP=1 keeps what they made.
test-compose test-kubernetes test-slurm: test-%: setup
	deploy/test_$*.sh

# What the manual is made with. `make docs` writes it to $(VENV)/site.
$(VENV)/.docs: requirements/docs.txt | setup
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --require-hashes -r $<
	@touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir $(abspath $(VENV))/site

lint: setup docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/basedpyright

protos: setup
	$(BIN)/python -m grpc_tools.protoc -I protos --python_out=protos --pyi_out=protos --grpc_python_out=protos \
	  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc --mypy_grpc_out=protos $(PROTOS)

bench: setup
	$(BIN)/python -m benchmarks.dataplane
	$(BIN)/python -m benchmarks.loop

clean:
	rm -rf $(VENV) runs
