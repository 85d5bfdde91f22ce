# make test             all tests, with all cases            make test K=hsdp     those that K selects, as pytest -k
# make matrix           all cases, as a grid                 make matrix K=hsdp   those that K selects
# make faults           every fault of the catalogue          make faults K=mesh    those that K selects
# make titan            torchtitan's environment; with TORCHTITAN=PATH of a clone, bisect its issue 711
# make lint             ruff and mypy                        PYTHON=python3.12    another interpreter for .venv
PYTHON ?= python3
SELECT = $(if $(K),-k "$(K)")
INSTALLED := .venv/.installed

.PHONY: matrix test faults lint titan
matrix: $(INSTALLED)
	.venv/bin/harness matrix $(SELECT) $(if $(TIER),--tier $(TIER))

test: $(INSTALLED)
	.venv/bin/python -m pytest -n 2 $(SELECT)

faults: $(INSTALLED)
	.venv/bin/harness faults --laws-only $(SELECT)

# torchtitan's environment; give TORCHTITAN=PATH, a clone of its repository, to see issue 711 found in its history.
titan: .venv-titan/.installed
	$(if $(TORCHTITAN),.venv-titan/bin/harness bisect --trainer torchtitan --repo $(TORCHTITAN) --good db6b39acd --bad 9a4eebe1c^ -k hsdp_2x2_valid)

.venv-titan/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-titan
	.venv-titan/bin/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	.venv-titan/bin/pip install --quiet -c constraints.txt -e '.[dev]'
	.venv-titan/bin/pip install --quiet torchtitan==0.3.0
	touch $@

lint: $(INSTALLED)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# torch goes first and alone, by its exact version: any other request may bring gigabytes of another build.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	.venv/bin/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@
