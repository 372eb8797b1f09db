# `make demo` and `make test` set up whatever is missing first; a second call starts at once. Tested on Linux.
#
#   TESTS=tests/single   what `make test` runs
#   PYTHON=python3.12    the Python that .venv is made from
#   HVD_QUANT_WITHOUT_TENSORFLOW=1, HVD_QUANT_WITHOUT_TORCH=1    leave a framework out

PYTHON ?= python3
TESTS ?= tests

FRAMEWORKS := $(if $(filter 1,$(HVD_QUANT_WITHOUT_TORCH)),,torch) \
              $(if $(filter 1,$(HVD_QUANT_WITHOUT_TENSORFLOW)),,tensorflow-cpu)

BIN := .venv/bin
# Inside .venv, so that deleting it starts over.
DONE := .venv/done

export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.PHONY: demo test docs lint package-check reproduce reproduce-full fuzz coverage sanitize stress threads clean

demo: $(DONE)/package $(DONE)/horovod
	@$(BIN)/python examples/pytorch/demo.py

test: $(DONE)/package $(DONE)/horovod
	@$(BIN)/python -m pytest $(TESTS)

# The site, in build/site: open its index.html.
docs: $(DONE)/package
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	echo "build/site/index.html"

lint: $(DONE)/package
	@$(BIN)/python -m ruff check
	$(BIN)/python -m mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cc' '*.h')

# The sdist, and a wheel for each set of frameworks, built, installed and tried in environments of their own (minutes).
package-check: $(DONE)/package
	@tests/package/run

# What takes longer than the tests have: SECONDS for each decoder (clang++ with libFuzzer) and for the threads, EXCHANGES in all.
SECONDS ?= 600
EXCHANGES ?= 10000

fuzz:
	@tests/native/run fuzz $(SECONDS)

threads:
	@tests/native/run threads $(SECONDS)

# The lines that no test runs, of the package (in their workers too: an hour or so) and of its kernels.
coverage: $(DONE)/package $(DONE)/horovod
	@tests/coverage/run python
	tests/coverage/run kernels

sanitize: $(DONE)/package
	@tests/sanitize/run

stress: $(DONE)/package $(DONE)/horovod
	@PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/horovodrun -np 4 --gloo $(BIN)/python tests/stress.py --exchanges $(EXCHANGES)

clean:
	rm -rf .venv build *.egg-info hvd_quant/*.so

$(DONE)/system:
	@echo '[1/4] System packages (up to two minutes)'
	check() { command -v "$$1" > /dev/null || echo "$$2"; }
	required() {
	    check $(PYTHON) python3
	    check g++ g++
	    $(PYTHON) -c 'import ensurepip' 2> /dev/null || echo python3-venv
	    $(PYTHON) -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2> /dev/null \
	        || echo python3-dev
	}
	optional() { check mpicxx libopenmpi-dev; check mpirun openmpi-bin; check ssh openssh-client; }
	slow_network() { check tc iproute2; check nsenter util-linux; }  # the demo says so if it has to do without
	if [ -n "$$(required; optional; slow_network)" ] && [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
	    export DEBIAN_FRONTEND=noninteractive
	    # What this can't bring is named below.
	    apt-get update -qq || true
	    apt-get install -y -qq --no-install-recommends $$(required; optional; slow_network) > /dev/null || true
	fi
	if [ -n "$$(required)" ]; then
	    echo "These system packages are missing (by their Debian names), please install them:" $$(required) >&2
	    exit 1
	fi
	if [ -n "$$(optional)" ]; then
	    echo "Horovod will use Gloo alone, which is enough; for MPI, install" $$(optional) "and run make clean."
	fi
	$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || {
	    echo "Python 3.10 to 3.13 is needed, and $(PYTHON) is" $$($(PYTHON) --version)": name another with PYTHON=..." >&2
	    exit 1
	}
	mkdir -p $(@D)
	touch $@

$(DONE)/frameworks: $(DONE)/system constraints.txt
	@echo '[2/4] .venv with $(strip $(FRAMEWORKS)) (minutes: about 1 GB to download)'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q $(FRAMEWORKS) setuptools
	# Keras 2, which the tests run with too. --no-deps: it asks for the wheel that tensorflow-cpu stands in for.
	$(if $(filter tensorflow-cpu,$(FRAMEWORKS)),$(BIN)/pip install -q --no-deps tf_keras)
	touch $@

# --no-build-isolation: the native kernels are built against the PyTorch in .venv. PYTHONWARNINGS: setuptools has one for
# every editable installation.
$(DONE)/package: $(DONE)/frameworks setup.py pyproject.toml $(wildcard csrc/*.cc csrc/kernels/*.h)
	@echo '[3/4] hvd_quant and its native kernels (a minute)'
	PYTHONWARNINGS=ignore $(BIN)/pip install -q --no-build-isolation -e '.[horovod,test,examples,docs,dev]'
	touch $@

# After the package, whose command this is, but not again whenever a kernel changes.
$(DONE)/horovod: $(DONE)/frameworks hvd_quant/cli/build_horovod.py | $(DONE)/package
	@echo '[4/4] Horovod (five to fifteen minutes the first time, seconds from the cache)'
	$(BIN)/hvd-quant build-horovod
	touch $@

# The papers' comparisons: a quarter of an hour's worth into results/reproduce, or all that docs/papers shows. Both go on where they
# were, and need root for the slow network.
reproduce: $(DONE)/package $(DONE)/horovod
	@mkdir -p results/reproduce
	$(BIN)/python benchmarks/convergence.py run --short --json results/reproduce/results.jsonl
	$(BIN)/python benchmarks/convergence.py report results/reproduce/results.jsonl --page results/reproduce/README.md
	echo results/reproduce/README.md

reproduce-full: $(DONE)/package $(DONE)/horovod
	@$(BIN)/python benchmarks/convergence.py run --json docs/papers/results.jsonl
	$(BIN)/python benchmarks/convergence.py report docs/papers/results.jsonl --page docs/papers/README.md
