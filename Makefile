# Every target makes .venv itself: nothing is needed beforehand but python3 (3.11 or newer) with venv.
#   make run         train the demonstration model on the standard library's source, into runs/demo
#   make test        the test suite on the best OpenCL device of those that pip installs
#   make platforms   the device tests on every platform, with those that apt brings, and Oclgrind's checkers
#   make llamacpp    builds llama.cpp (ten minutes or more, with a C++ compiler) and tests exported models in it
#   make acceptance  the long checks; results go to bench/results
#   make lint        ruff and mypy
# ARGS="..." is handed to the program that the target runs, for example: make run ARGS="--steps 100"
PYTHON ?= python3
ARGS ?=
# Test processes at a time.
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin

.NOTPARALLEL:
.PHONY: run test platforms llamacpp acceptance lint clean

# The CPU runtime that pip installs, where there is one (x86-64 Linux), else the best device; DEVICE=... chooses another.
DEVICE ?= $(if $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -)),cpu)
run: $(VENV)/.installed-run
	$(BIN)/memtrain-cl train --out runs/demo $(if $(DEVICE),--device "$(DEVICE)") $(ARGS)

# An empty folder in place of the system's drivers: the suite must pass with what pip installed, here as on a bare machine.
test: $(VENV)/.installed-test
	@mkdir -p $(VENV)/no-system-drivers
	OCL_ICD_VENDORS=$(CURDIR)/$(VENV)/no-system-drivers $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

platforms: $(VENV)/.installed-test
	$(BIN)/python scripts/platforms.py --jobs $(JOBS) $(ARGS)

llamacpp: $(VENV)/.installed-llamacpp
	$(BIN)/python -m pytest tests/test_llamacpp.py $(ARGS)

acceptance: $(VENV)/.installed-test
	$(BIN)/python -m bench.acceptance $(ARGS)

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.installed-run: EXTRAS := cpu,plot
$(VENV)/.installed-test: EXTRAS := cpu,pocl,test
$(VENV)/.installed-lint: EXTRAS := dev,test
$(VENV)/.installed-llamacpp: EXTRAS := cpu,llamacpp,test
# From its source package, without the part that sees pictures.
$(VENV)/.installed-llamacpp: export PIP_NO_BINARY := llama-cpp-python
$(VENV)/.installed-llamacpp: export CMAKE_ARGS := -DLLAVA_BUILD=OFF
$(VENV)/.installed-llamacpp: export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "expected Python 3.11 or newer, got " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# A stamp a set of extras: pip runs again only when the project's requirements change.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(VENV)/.created
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@
