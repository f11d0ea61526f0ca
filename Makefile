# Two commands are enough: `make run` trains a model end to end on this machine's CPU, `make test` checks everything.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
PROTOS := $(sort $(shell find protos -name '*.proto'))

.PHONY: setup run test lint protos bench clean

setup: $(VENV)/.installed

$(VENV)/.installed: requirements/cpu.txt pyproject.toml deploy/setup.sh
	@PYTHON=$(PYTHON) VENV=$(VENV) bash deploy/setup.sh
	@touch $@

run: setup
	$(BIN)/lockstep data arithmetic --out data/arithmetic
	$(BIN)/lockstep run deploy/runs/quickstart.yaml name=quickstart-$$(date +%Y%m%d-%H%M%S)

test: setup lint
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

protos: setup
	$(BIN)/python -m grpc_tools.protoc -I protos --python_out=protos --pyi_out=protos --grpc_python_out=protos $(PROTOS)

bench: setup
	$(BIN)/python -m benchmarks.dataplane
	$(BIN)/python -m benchmarks.loop

clean:
	rm -rf $(VENV) runs
