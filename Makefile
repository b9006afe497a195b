# Everything a user or developer runs. The environment is made on first use and again when pyproject.toml changes.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DATA   ?= data
SEEDS  ?= 200
CORES  ?= 1
BENCH  ?= all

.PHONY: help install demo demo-spark run test check bench simulate proto clean
help:
	@echo "make demo              the main job on real input: publish, crash, consume, check (about 2 minutes; EVENTS=20000: a part)"
	@echo "make demo-spark        the same flights as DataFrames while a driver and a bookie are killed (needs Java 17; EVENTS=20000: a part)"
	@echo "make install           the environment, for commands typed by hand: source $(VENV)/bin/activate"
	@echo "make run               a standalone server in the foreground on ./$(DATA)"
	@echo "make test              the whole test suite"
	@echo "make check             ruff, mypy --strict, import contract"
	@echo "make bench BENCH=a,b   benchmarks (CHECK=1 compares with benchmarks/bars.toml)"
	@echo "make simulate SEEDS=n  n seeds of the simulator (CORES=k: in k processes; FRESH=1: seeds nobody has seen; BRANCHES=1: of the cores)"

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "no venv module: install it (Debian: apt install python3-venv)"; rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/cepheid demo $(if $(EVENTS),--events $(EVENTS))

demo-spark: $(STAMP)
	$(BIN)/cepheid demo-spark $(if $(EVENTS),--events $(EVENTS))

run: $(STAMP)
	$(BIN)/cepheid standalone --data $(DATA)

test: $(STAMP)
	@$(BIN)/python -m cepheid_spark --install-java  # root on Debian: else the tests of Spark are skipped, and say so
	@trap 'exit 130' INT; failed=; \
	$(BIN)/python -m pytest -q tests/simulation || failed=1; \
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --ignore tests/simulation || failed=1; \
	test -z "$$failed"

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(BENCH) $(if $(CHECK),--check)

simulate: $(STAMP)
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --cores $(CORES) $(if $(FRESH),--fresh) $(if $(BRANCHES),--branches)

clean:
	rm -rf $(VENV) demo-data demo-spark-data .pytest_cache .mypy_cache .ruff_cache .hypothesis
