# make test             the quick tests and 14 cases         make test K=hsdp     the cases, or tests, that K selects
# make test R=recording the tests of one ring, or of the core
# make test ALL=1       all tests, and all cases of the default tier, as the gate does
# make matrix           the cases of the default tier, as a grid                 make matrix K=hsdp   those that K selects
# make faults           every fault of the catalogue          make faults K=mesh    those that K selects
# make test-adapters    the tests of torchtitan's, Megatron's, DeepSpeed's, picotron's and transformers' adapters, with these
# make titan            all cases on torchtitan 0.3.0     make titan TORCHTITAN=PATH   bisect issue 711 in a clone of it
# make mutants          20 altered judgements of each check, the plan and the bounds: does a test notice?
#                       make mutants N=0 MODULES=harness/core/checks/loss.py   all those of one file; harness/core/causes/*.py too
# make gpu              all that fits on this machine's GPUs, in parts of 9 minutes; results lie under benchmarks/gpu
#                       make gpu-packages   fills .gpu-packages, which travels to a machine without network
# make lint             ruff and mypy                        PYTHON=python3.12    another interpreter for .venv
PYTHON ?= python3
SELECT = $(if $(K),-k "$(K)")
INSTALLED := .venv/.installed

.PHONY: matrix help test test-adapters faults gpu gpu-packages lint titan titan-months titan-history mutants
matrix: $(INSTALLED)
	.venv/bin/harness matrix $(SELECT) $(if $(TIER),--tier $(TIER))

help:
	@sed -n '/^# /!q;s/^# //p' Makefile

test: $(INSTALLED)
	.venv/bin/python -m pytest -n 3 $(if $(ALL)$(K)$(R),,--short) $(if $(R),tests/$(R)) $(SELECT)

test-adapters: .venv-adapters/.installed
	.venv-adapters/bin/python -m pytest -n 3 tests/adapters/*.py $(SELECT)

faults: $(INSTALLED)
	.venv/bin/harness faults --checks-only $(SELECT)

# torchtitan in an environment of its own; with TORCHTITAN=PATH of a clone, issue 711 is looked for in its history instead.
titan: .venv-adapters/.installed
	.venv-adapters/bin/harness $(if $(TORCHTITAN),bisect --repo $(TORCHTITAN) --good db6b39acd --bad 9a4eebe1c^ -k hsdp_2x2_valid,matrix $(SELECT)) --trainer torchtitan

# One case each of pp, cp and tp at every month's end of the clone's history; makes docs/results/torchtitan_commits.md anew.
titan-months: .venv-adapters/.installed
	.venv-adapters/bin/python benchmarks/torchtitan_commits.py $(TORCHTITAN) --months --again

# Its fixes, and what made them necessary, before and after; makes the tables of docs/results/torchtitan_history.md.
titan-history: .venv-adapters/.installed
	.venv-adapters/bin/python benchmarks/torchtitan_history.py $(TORCHTITAN)

# What is adapted wants other versions than constraints.txt of what no test uses.
.venv-adapters/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-adapters
	.venv-adapters/bin/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	.venv-adapters/bin/pip install --quiet -c constraints.txt -e '.[dev]'
	.venv-adapters/bin/pip install --quiet torchtitan==0.3.0 accelerate==1.15.0
	.venv-adapters/bin/pip install --quiet --no-deps megatron-core==0.16.1
	DS_BUILD_OPS=0 .venv-adapters/bin/pip install --quiet --no-build-isolation deepspeed==0.19.8
	touch $@

# On the python that is there, with its torch: nothing is fetched. What travelled along in .gpu-packages lies before what is
# there; make gpu says what is missing all the same, and what is done without it.
GPU_PATH := $(CURDIR)/.gpu-packages/site:$(CURDIR)
gpu:
	mkdir -p .gpu-packages/site
	if ls .gpu-packages/*.whl >/dev/null 2>&1; then $(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile \
	  --upgrade --target .gpu-packages/site .gpu-packages/*.whl; fi
	PYTHONPATH=$(GPU_PATH) $(PYTHON) -m tools.gpu $(if $(K),-k "$(K)") $(if $(MINUTES),--minutes $(MINUTES)) $(GPU_ARGS)

# For CPython 3.12 on x86-64: torchao, which has one wheel for all of them. The rest a machine with torch usually has.
gpu-packages:
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
	  --platform manylinux_2_28_x86_64 -d .gpu-packages "$$(grep '^torchao==' constraints.txt)"

# mutmut makes the mutants; it lies beside the environment, not in it.
mutants: $(INSTALLED) .mutmut
	PYTHONPATH=.mutmut .venv/bin/python tools/mutants.py -n $(or $(N),20) $(if $(FAULTS),--faults $(FAULTS)) $(MODULES)

.mutmut:
	.venv/bin/pip install --quiet --no-deps --target $@ mutmut==3.8.1 libcst==1.9.0

lint: $(INSTALLED)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# torch goes first and alone, by its exact version: any other request may bring gigabytes of another build.
# Two at a time, for pip uses one core: torch with what it needs, and beside it what else is large; at last, all the rest.
LARGE := ray|transformers|tokenizers|hf-xet|mypy|ruff|matplotlib|pillow|fonttools|numpy|torchao|pydantic_core|pydantic
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	grep -E '^($(LARGE))==' constraints.txt >.venv/large.txt
	.venv/bin/pip install --quiet --no-deps -r .venv/large.txt & \
	  .venv/bin/pip install --quiet --no-compile "$$(grep '^torch==' constraints.txt)" && wait $$!
	.venv/bin/python -m compileall -q .venv/lib/python3*/site-packages/torch >.venv/compiled.txt & \
	  .venv/bin/pip install --quiet -c constraints.txt -e '.[dev,ray]' && wait
	touch $@
