# `make demo` and `make test` need nothing but Python 3.11 and a network (or a folder of wheels).
.DEFAULT_GOAL := help
SHELL := bash
BIN := .venv/bin
# Most tests wait for something most of the time: three at once are about twice as fast on two cores.
SIDE_BY_SIDE := -n 3 --dist worksteal

.PHONY: help setup demo test test-compose test-compose-vllm test-two-nodes lint types unit sim matrix page e2e bench protos format clean

help: ## what there is
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: ## the virtual environment, once
	@scripts/setup.sh

demo: setup ## a real model answers through two engines, checked against one
	@$(BIN)/pdserve demo

test: lint types unit sim matrix page e2e ## everything, fast things first

test-compose: setup ## deploy/compose in a container engine of its own: needs root, docker.io, mmdebstrap and iptables
	@$(BIN)/python -m tests.compose

test-compose-vllm: setup ## the same with vLLM on CPU, by hand: its image takes minutes; PIP_FIND_LINKS has torch
	@$(BIN)/python -m tests.compose vllm

lint: setup ## format, lint, import contracts, protos
	@echo "== lint"
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/lint-imports
	@$(BIN)/buf lint protos

types: setup ## mypy, strict
	@echo "== types"
	@$(BIN)/mypy

unit: setup ## cores and contracts
	@echo "== unit and contract"
	@$(BIN)/pytest -q $(SIDE_BY_SIDE) tests/unit tests/contract

sim: setup ## the whole path on simulated engines
	@echo "== sim"
	@$(BIN)/pytest -q $(SIDE_BY_SIDE) tests/sim

matrix: setup ## every fault in every phase of a request, on real processes
	@echo "== fault matrix"
	@$(BIN)/pytest -q -n 2 --dist worksteal tests/matrix

page: setup ## the page of `pdserve traces` in headless Chromium
	@echo "== page"
	@$(BIN)/pytest -q -n 2 --dist worksteal tests/page

e2e: setup ## the whole path: deployments of processes, vLLM
	@echo "== pdserve up"
	@$(BIN)/pytest -q -n 2 --dist loadfile tests/e2e/cli
	@echo "== vLLM on CPU"
	@$(BIN)/pytest -q tests/e2e/test_bench_vllm_serve.py tests/e2e/up tests/e2e/vllm

test-two-nodes: setup ## two network namespaces and what happens to the link between, as root
	@echo "== two nodes"
	@$(BIN)/pytest -q -rs tests/two_nodes

bench: setup ## what kvd costs: ratios measured in one run
	@$(BIN)/python -m pdserve.kvd.bench

protos: setup ## stubs, after a change of a .proto
	@$(BIN)/python protos/generate.py

format: setup ## ruff
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .

clean: ## the virtual environment and all caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
