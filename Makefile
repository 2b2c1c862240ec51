PYTHON ?= python3
VENV ?= .venv
CACHE ?= .cache
REFERENCE_VENV ?= .venv-reference
BIND ?= 127.0.0.1:8081

export PIP_DISABLE_PIP_VERSION_CHECK = 1

# The two environments of the tests are made side by side.
MAKEFLAGS += --jobs=2

.PHONY: run test parity equivalence-real bench figures lint format clean

run: $(VENV)/run.stamp
	exec env BGE_M3_MODEL=preview BGE_M3_CACHE_DIR=$(CACHE) BGE_M3_BIND=$(BIND) BGE_M3_LOG_FORMAT=text $(VENV)/bin/bge-m3-server serve

test: $(VENV)/dev.stamp $(REFERENCE_VENV)/stamp
	REFERENCE_VENV=$(REFERENCE_VENV) $(VENV)/bin/python -m pytest --cov --cov-report=term:skip-covered $(PYTEST_ARGS)

# The parity tables of docs/parity.md: random checkpoints, prepared models, and BGE-M3 itself.
parity: $(VENV)/dev.stamp $(REFERENCE_VENV)/stamp
	REFERENCE_VENV=$(REFERENCE_VENV) $(VENV)/bin/python -m tests.equivalence.parity
	$(VENV)/bin/python -m tests.equivalence.prepared

equivalence-real: $(VENV)/dev.stamp
	BGE_M3_EQUIVALENCE_REAL=1 HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest -rs tests/equivalence/test_real_model.py

# This server and its peers side by side, docs/performance.md; options as BENCH_ARGS, see --help.
bench: $(VENV)/dev.stamp
	$(VENV)/bin/python -m benchmarks.performance $(BENCH_ARGS)

# The figures of docs/startup-probe.md, from the measurements that are kept in tools/visuals.
figures: $(VENV)/dev.stamp
	$(VENV)/bin/python tools/visuals/draw.py

lint: $(VENV)/dev.stamp
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/dev.stamp
	$(VENV)/bin/ruff format
	$(VENV)/bin/ruff check --fix

clean:
	rm -rf $(VENV) $(REFERENCE_VENV) $(CACHE) build *.egg-info

# Dependency groups need pip 25.1.
$(VENV)/pip.stamp:
	$(PYTHON) -c 'import sys; sys.exit("bge-m3-server needs Python 3.11 or newer; run: make PYTHON=python3.12 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/run.stamp: pyproject.toml | $(VENV)/pip.stamp
	$(VENV)/bin/pip install --quiet --editable '.[preview,openvino]'
	@touch $@

# All in one go: of two that install into one environment at once, one would spoil the other.
$(VENV)/dev.stamp: pyproject.toml | $(VENV)/pip.stamp
	$(VENV)/bin/pip install --quiet --editable '.[preview,otlp,plot,openvino]' --group test --group lint
	@touch $@

# FlagEmbedding needs older packages than the server: it computes its numbers in a place of its own.
$(REFERENCE_VENV)/stamp: tests/equivalence/reference/requirements.txt
	$(PYTHON) -m venv $(REFERENCE_VENV)
	$(REFERENCE_VENV)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(REFERENCE_VENV)/bin/pip install --quiet --requirement $<
	@touch $@
