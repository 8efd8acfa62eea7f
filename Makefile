# SPDX-License-Identifier: Apache-2.0
# The index of habits. Each is a script that CI and people run alike.
.PHONY: help setup demo test lint format bench docs clean

help:
	@echo "New here? make demo"
	@echo
	@echo "make demo                 one document, two workers: computed on one, pulled by the other"
	@echo "make demo KEEP=1          the same, and everything stays up for you to try"
	@echo "make demo SCENE=agent     forks, pauses and a compaction of an agent, and what the router does"
	@echo "make demo SCENE=failover  an engine killed while it answers, with and without KVCR (ten minutes)"
	@echo "make setup                the environment in .venv: ten minutes once, seconds after that"
	@echo
	@echo "make test                 all tests (an hour or more); STAGES='lint unit' for some of:"
	@echo "                          lint unit integration crash e2e wheel docs compose"
	@echo "make lint                 format, lint, types, licence lines; make format repairs the first two"
	@echo "make bench NAME=x         a benchmark, JSON on the last line; QUICK=1: short; no NAME: which there are"
	@echo "make docs                 regenerate settings, reference and deploy files, and build the site"
	@echo "make clean                remove what builds and tests leave; .venv and models stay"

setup:
	@bash scripts/setup.sh

demo: setup
	@bash scripts/demo.sh $(ARGS)

test: setup
	@bash scripts/test.sh $(STAGES)

lint: setup
	@bash scripts/lint.sh

format: setup
	@bash scripts/lint.sh --fix

bench: setup
	@test -n "$(NAME)" || { echo "make bench NAME=...; there are:" \
		$$(ls bench/*.py | xargs -n1 basename -s .py | grep -v -e '^_' -e '^peer_'); exit 2; }
	@.venv/bin/python -m bench.$(NAME) $(if $(QUICK),--quick) $(ARGS)

docs: setup
	@.venv/bin/python scripts/gen_signal_schema.py
	@bash scripts/docs.sh

clean:
	rm -rf build dist .venv-docs .cache components/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -print | xargs rm -rf
