# SPDX-License-Identifier: Apache-2.0
# The index of habits. Each is a script that CI and people run alike.
.PHONY: help setup demo test lint format bench docs clean

help:
	@echo "make setup              the environment in .venv (minutes once, seconds again)"
	@echo "make demo               one document, two workers: computed on one, pulled by the other"
	@echo "make demo SCENE=agent   forks, pauses and a compaction of an agent: each signal, its plan, what moved"
	@echo "make demo SCENE=failover  an engine killed while it answers, with KVCR and without (ten minutes)"
	@echo "make test               lint, unit, integration, crash, e2e, wheel, docs, compose; STAGES='unit e2e' for some of them"
	@echo "make lint               format, lint, types, licence lines; make format repairs the first two"
	@echo "make bench NAME=x       python -m bench.x, JSON on the last line; QUICK=1 for a short run"
	@echo "make docs               regenerate what is generated (settings, reference, deploy files), build the site"
	@echo "make clean              remove what builds and tests leave; .venv and downloaded models stay"

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
