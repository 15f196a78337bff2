# make demo    the plugin on a real engine: prompts computed once, then loaded from host memory
# make test    the tests that need no GPU, on vLLM's CPU engine, 5 minutes on two cores; slowest last
# make test-all  also the slow ones, long soaks, vLLM 0.31's engine and scheduler, and the benches once
# make breaks  takes protections out of the product one by one: the tests must notice each
# make gpu-test  every test that needs a GPU, on a host that has CUDA, CuPy and vLLM
# make check   ruff and mypy
# make wheel   the wheel, installed into an empty environment and tried there
# make site    the documentation as web pages, in .site/html
#
# Nothing is needed but Linux, Python 3.11 or newer with pip, and make. Each target makes the
# environment that it needs in this folder (.venv, .venv-0.31.0, .venv-wheel), once. Where PYTHON has
# CUDA and vLLM already, `make demo` uses those and installs nothing.
#
#     make demo PYTHON=python3.12 ARGUMENTS=--verbose
#     make test TESTS="tests/kv_offload -x"
#     make test TESTS="tests/kv_offload -n 0 -s"   one test at a time, in one process
#     make test-all ENGINES=0.32.0 TESTS=tests/engine

PYTHON ?= python3
ENGINES ?= 0.32.0 0.31.0
TESTS ?= tests
ARGUMENTS ?=

.PHONY: demo test test-all breaks gpu-test check wheel site clean
.DEFAULT_GOAL := demo

environment := $(PYTHON) bench/environment.py
in_venv := $(environment) run --dev --
pytest := $(environment) run --dev --engine $(firstword $(ENGINES)) -- -m pytest
# As many tests at a time as there are cores, four at most. A process that has none left takes half of
# those that wait for another one.
at_a_time := -n auto --dist worksteal

demo:
	@$(environment) demo -- $(ARGUMENTS)

# On the first engine, with short soaks.
test:
	@SOAK_SECONDS=$${SOAK_SECONDS:-6} INTERLEAVINGS_SECONDS=$${INTERLEAVINGS_SECONDS:-6} \
	  $(pytest) $(at_a_time) -m "not slow" --durations=10 $(TESTS)

# The tests that other engines run, unless TESTS names some: all that play vLLM's scheduler, and of
# whole engines those of hooks, cache types, events, failures, sleep and shutdown. The rest looks at disks,
# remote stores and processes, which do not depend on vLLM's version, and would take CI too long.
interface := tests/kv_offload $(patsubst %,tests/engine/test_%.py,\
  control draft_head faults kinds kv_events lifetime requests round_trip sleep)

# The first engine runs everything; the others what depends on vLLM's version and is not slow, with
# short soaks. ENGINES=0.31.0 runs everything on that one.
# The benches run once, unmeasured: that they still work is all that this shows.
test-all:
	@SOAK_SECONDS=$${SOAK_SECONDS:-90} INTERLEAVINGS_SECONDS=$${INTERLEAVINGS_SECONDS:-60} \
	  POOL_MOMENTS=$${POOL_MOMENTS:-40} FLIPS=$${FLIPS:-200} \
	  $(pytest) $(at_a_time) --durations=10 $(TESTS)
	@set -e; for engine in $(wordlist 2,9,$(ENGINES)); do \
	  SOAK_SECONDS=30 INTERLEAVINGS_SECONDS=20 $(environment) run --dev --engine $$engine -- \
	    -m pytest $(at_a_time) --durations=10 $(if $(filter-out tests,$(TESTS)),$(TESTS),$(interface)) \
	    -m "engine and not slow"; \
	done
	@$(environment) run --dev --engine $(firstword $(ENGINES)) -- -m pytest bench/*/bench_*.py

# In a copy of the tree. `make breaks ARGUMENTS="tests/breaks/worker.txt --only fence"` tries some.
breaks:
	@$(in_venv) -m tests.breaks $(ARGUMENTS)

# With the CUDA, vLLM and pytest that PYTHON has.
gpu-test:
	$(PYTHON) -m tests.gpu.support_table $(ARGUMENTS)

check:
	@$(in_venv) -m ruff check .
	@$(in_venv) -m ruff format --check .
	@$(in_venv) -m mypy

wheel:
	rm -rf dist .venv-wheel
	@$(in_venv) -m build --outdir dist
	@$(in_venv) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet dist/*.whl
	.venv-wheel/bin/python -m pip check
	cd .venv-wheel && bin/kv-offload --version
	cd .venv-wheel && bin/kv-offload config
	cd .venv-wheel && bin/python ../bench/check_installed.py ..

# Pages keep the paths of the checkout, so that their links to one another and to results work.
site:
	rm -rf .site
	mkdir -p .site/pages/bench
	ln -s $(addprefix ../../,$(wildcard *.md) LICENSE docs) .site/pages
	ln -s ../../../bench/results .site/pages/bench
	@NO_MKDOCS_2_WARNING=1 $(in_venv) -m mkdocs build --strict

clean:
	rm -rf .venv .venv-* .site dist
