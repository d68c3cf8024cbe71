# Everything a user or a developer does, from a bare machine: Linux, Python 3.11 or newer, make. See README.md.
#
#   PYTHON=...      the Python to build .venv with; by default the first one found that is new enough
#   TORCH_ARGS=...  more arguments for `pip install torch`, to choose another build of it
#   PYTEST_ARGS=... more arguments for pytest; `-n 0` runs the tests in one process, for a debugger
#   BENCH_ARGS=...  arguments for the benchmarks, instead of --quick
#   SCREENSHOTS=... the folder of `make screenshots`, instead of build/screenshots
#   COMPARE_ARGS=... arguments for `make compare`, such as --only steady
#   CHAOS_ARGS=...  arguments for the first campaign of `make chaos`, instead of --minutes 10
#   FUZZ_SECONDS=... how long `make fuzz` tries new input for each fuzzer, instead of 120
#   WORLD_SECONDS=... how long `make world` runs, instead of 60; SEED=... the world of one seed alone, with its story
#   SOAK_MINUTES=... how long `make soak` runs, instead of 30
#   GPU_ARGS=...    arguments for the checklist of `make test-gpu`, such as --dry-run
#   MUTANT_SECONDS=... how long `make mutants` and `make holes` try each, instead of 60; MUTANT=..., HOLE=... one alone

BIN := .venv/bin
STAMP := .venv/installed
TORCH_ARGS ?=
PYTEST_ARGS ?=
# Most tests wait for other processes. A file's tests stay in one process, since they share pools. Not reordered, so
# that the longest files of test-long do not come last.
PYTEST := $(BIN)/python -m pytest
# A process that crashes is started again once: the new one begins with the test that the other one crashed in.
IN_PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart=1
# To collect all tests takes each process half a minute: only files that have such tests are collected.
MARKED = $(if $(findstring tests/,$(PYTEST_ARGS)),,$(shell grep -rl --include='test_*.py' 'mark\.$(1)\b' tests | sort))
BENCH_ARGS ?= --quick
SCREENSHOTS ?= build/screenshots
DURATIONS := $(CURDIR)/build/durations
CHAOS_ARGS ?= --minutes 10
FUZZ_SECONDS ?= 120
CAMPAIGN := $(BIN)/resile chaos campaign --own-pool tests/chaos/scripts/attacked.py
BENCHMARKS := $(wildcard bench/checkpoint.py bench/costs.py bench/decisions.py bench/exchange.py bench/page.py bench/policies.py bench/pool.py bench/recovery.py bench/registry.py bench/rescale.py bench/second_job.py bench/shards.py bench/simulate.py bench/solver.py bench/startup.py bench/steady.py bench/tracing.py)

NEW_ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
CANDIDATES := python3 python3.13 python3.12 python3.11 python3.14 python
PYTHON ?= $(shell for python in $(CANDIDATES); do \
	if $$python -c '$(NEW_ENOUGH)' 2>/dev/null; then command -v $$python; break; fi; done)

# Tests start thousands of processes, which all import our modules: each would compile them anew without .pyc files.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test test-long test-nightly durations test-quick test-gpu lint screenshots bench chaos chaos-wrong chaos-nightly compare nightly fuzz world mutants holes soak clean

# In .venv/installed is what TORCH_ARGS was: pip keeps a torch that is there, whatever build of it is asked for.
define CHECK_TORCH
@if [ -n '$(TORCH_ARGS)' ] && [ -e $(STAMP) ] && [ "$$(cat $(STAMP))" != '$(TORCH_ARGS)' ]; then \
	echo 'another build of torch is in .venv already: run `make clean` before you choose one' >&2; exit 1; fi
endef

install: $(STAMP)
	$(CHECK_TORCH)
	@$(BIN)/python -c 'from importlib.metadata import version as v; print("resile", v("resile"), "with torch", v("torch"))'

demo: $(STAMP)
	$(BIN)/resile demo

test: $(STAMP)
	$(PYTEST) $(IN_PARALLEL) -m 'not long and not nightly' $(PYTEST_ARGS)

# Status 5, no tests collected: PYTEST_ARGS may select tests of one part alone.
test-long: $(STAMP)
	$(PYTEST) $(IN_PARALLEL) -m 'long and not alone and not nightly' $(call MARKED,long) $(PYTEST_ARGS) || [ $$? -eq 5 ]
	$(PYTEST) -m 'long and alone and not nightly' $(call MARKED,alone) $(PYTEST_ARGS) || [ $$? -eq 5 ]

# In tests/durations.md: how long each file of tests takes, in time and in processor time, also if some fail.
durations: $(STAMP)
	mkdir -p build && rm -f $(DURATIONS)
	-RESILE_TEST_DURATIONS=$(DURATIONS) $(MAKE) --keep-going test test-long PYTEST_ARGS='-p tests.durations'
	$(BIN)/python -m tests.durations $(DURATIONS) > tests/durations.md

test-quick: $(STAMP)
	$(PYTEST) $(IN_PARALLEL) -m 'not long and not nightly' --ignore=tests/system $(PYTEST_ARGS)

# A checklist for a machine with GPUs; it prints a report to attach to an issue. GPU_ARGS=--dry-run: on any machine.
test-gpu: $(STAMP)
	$(BIN)/python -m tests.gpu.checklist $(GPU_ARGS)
	$(if $(findstring --dry-run,$(GPU_ARGS)),,$(PYTEST) -o addopts='-ra --strict-markers --import-mode=importlib' tests/gpu $(PYTEST_ARGS))

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy examples
	$(BIN)/lint-imports

# Pictures of every view of the page, in SCREENSHOTS (index.html shows all): phone, desktop, light, dark, empty, failed.
screenshots: $(STAMP)
	PAGE_PICTURES=$(SCREENSHOTS) $(PYTEST) tests/monitor/test_page.py tests/system/test_page.py $(PYTEST_ARGS)
	@echo 'open $(SCREENSHOTS)/index.html'

bench: $(STAMP)
	@status=0; for script in $(BENCHMARKS); do \
		echo "$(BIN)/python $$script $(BENCH_ARGS)"; $(BIN)/python $$script $(BENCH_ARGS) || status=1; \
	done; exit $$status

# The speed of this checkout and that of a fixed earlier one, in turns; on a machine with nothing else to do.
compare: $(STAMP)
	$(BIN)/python bench/compare.py $(COMPARE_ARGS)

test-nightly: $(STAMP)
	$(PYTEST) $(IN_PARALLEL) -m 'nightly and not alone' $(call MARKED,nightly) $(PYTEST_ARGS) || [ $$? -eq 5 ]
	$(PYTEST) -m 'nightly and alone' $(call MARKED,alone) $(PYTEST_ARGS) || [ $$? -eq 5 ]

nightly: test-nightly chaos-nightly compare

mutants: $(STAMP)
	$(BIN)/python -m tests.world.mutants

# What the protocol was once wrong about, put back: as mutants, with HOLE=... for one alone.
holes: $(STAMP)
	$(BIN)/python -m tests.world.holes

# Hosts with networks of their own, and then a pool whose storage is an S3 server, which they could not reach.
chaos: $(STAMP)
	$(CAMPAIGN) $(CHAOS_ARGS)
	$(CAMPAIGN) --s3 --minutes 3 $(foreach attack,kill freeze slow corrupt,--only '$(attack) object-store') --only 'kill job'

# Pools that are wrong on purpose: a campaign against each must find its broken promise.
chaos-wrong: $(STAMP)
	$(BIN)/python tests/chaos/wrong/campaigns.py

chaos-nightly: CHAOS_ARGS = --minutes 120 --seed $(shell date +%Y%m%d)
chaos-nightly: chaos

fuzz: $(STAMP)
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(PYTEST) -o timeout=0 tests/fuzz $(PYTEST_ARGS)

soak: $(STAMP)
	$(BIN)/python -m tests.soak

world: $(STAMP)
	$(BIN)/python -m tests.world

clean:
	rm -rf .venv demo-out build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@if [ -z '$(PYTHON)' ]; then echo 'no Python 3.11 or newer with venv was found among: $(CANDIDATES);' \
		'install one (on Debian: python3 python3-venv), or name it with PYTHON=/path/to/python' >&2; exit 1; fi
	@$(PYTHON) -c '$(NEW_ENOUGH)' || { echo '$(PYTHON) is older than 3.11, or lacks venv' >&2; exit 1; }
	$(PYTHON) -m venv .venv

$(STAMP): $(BIN)/python pyproject.toml constraints.txt
	$(CHECK_TORCH)
	$(if $(TORCH_ARGS),$(BIN)/python -m pip install -c constraints.txt torch $(TORCH_ARGS))
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@if [ -z '$(TORCH_ARGS)' ] && [ -e $@ ]; then touch $@; else echo '$(TORCH_ARGS)' > $@; fi
