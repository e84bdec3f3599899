# `make help` lists what there is. The two commands of the README are `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROJECTS := shared services/teacher services/gateway services/rollout services/trainer

.PHONY: help install demo smollm2 test test-fast lint bench bench-scoring clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

install: $(STAMP) ## the CPU environment of all services, in .venv

$(STAMP): requirements/cpu.txt pyproject.toml $(addsuffix /pyproject.toml,$(PROJECTS))
	$(PYTHON) -c 'import sys; sys.exit("opd needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else 0'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps -r requirements/cpu.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation $(addprefix -e ./,$(PROJECTS)) -e .
	touch $@

demo: $(STAMP) ## the main job: two tiny teachers, one student, real engines, at most six minutes
	$(BIN)/opd up --config configs/demo.yaml --fresh

smollm2: $(STAMP) ## the same with a real public model, about a quarter of an hour
	$(BIN)/opd fetch smollm2-135m
	$(BIN)/opd fetch smollm2-student
	$(BIN)/opd up --config configs/smollm2.yaml --fresh

bench-loss: $(STAMP) ## time and memory of the loss against a full log-softmax and cross-entropy
	$(BIN)/opd fetch smollm2-135m
	$(BIN)/python -m benchmarks.loss

test: $(STAMP) lint ## all tests
	$(BIN)/python -m pytest

test-fast: $(STAMP) ## tests that start no engine
	$(BIN)/python -m pytest -m "not engine"

lint: $(STAMP) ## style, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

bench: bench-loss bench-scoring ## all measurements against their targets; docs/benchmarks.md has what they gave

bench-scoring: $(STAMP) ## teacher and gateway beside vllm serve, thirteen minutes on two idle cores
	$(BIN)/opd fetch smollm2-135m
	$(BIN)/python -m benchmarks.scoring

clean: ## delete the environment and the runs
	rm -rf $(VENV) runs
