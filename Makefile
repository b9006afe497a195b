# Everything a user or developer runs. The environment is made on first use and again when pyproject.toml changes.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DATA   ?= data
SEEDS  ?= 200
CORES  ?= 1
SUITE   = $(BIN)/python -m tests.suite $(if $(REPEAT_FAILED),--repeat-failed)
BENCH  ?= all

# Without compiled modules on disk every process that a test starts compiles the product again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo demo-spark demo-tiered run test test-all test-kubernetes pulsar kafka test-pulsar check bench bench-peers simulate image clean
help:
	@echo "make demo              the main job on real input: publish, crash, consume, check (about 2 minutes; EVENTS=20000: a part)"
	@echo "make demo-spark        the same flights as DataFrames while a driver and a bookie are killed (needs Java 17; EVENTS=20000: a part)"
	@echo "make demo-tiered       the same flights in an S3 bucket: offload through a crash, query, restore (needs Java 17; EVENTS=20000: a part)"
	@echo "make install           the environment, for commands typed by hand: source $(VENV)/bin/activate"
	@echo "make run               a standalone server in the foreground on ./$(DATA)"
	@echo "make check             format, lint, import contracts, types, generated pages (a minute or two)"
	@echo "make test              the fast tests of every part (under 6 minutes on two cores)"
	@echo "make test-all          every test (under 30 minutes)"
	@echo "make test-kubernetes   the Helm chart on a real Kubernetes, started here (root on Linux, Go; builds it once in 10 minutes)"
	@echo "make test-pulsar       the Python client against Apache Pulsar, fetched once with Maven (250 MB; needs Java 17)"
	@echo "make image             the container image (IMAGE=name:tag BUILDER=buildah|podman|docker|archive EXTRAS=...)"
	@echo "make bench BENCH=a,b   benchmarks (CHECK=1: pairs with the server of an earlier commit, fails if slower)"
	@echo "make bench-peers       the same loads at Cepheid and at Apache Pulsar or Kafka, in turn (BENCH=a,b; about an hour)"
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

demo-tiered: $(STAMP)
	$(BIN)/cepheid demo-tiered $(if $(EVENTS),--events $(EVENTS))

run: $(STAMP)
	$(BIN)/cepheid standalone --data $(DATA)

# A Java for Spark: installed as root on Debian (12, 13, others). Elsewhere the tests of Spark are skipped, and say so.
JAVA = $(BIN)/python -m cepheid_spark || { apt-get update -qq; \
	for package in openjdk-17 openjdk-21 default; do apt-get install -qq --no-install-recommends $$package-jre-headless && break; done; } \
	|| echo "Java was not installed: what needs Spark will be skipped."

# Helm renders the chart in tests. Where there is none it is built from its Go module, once, in a minute or two.
HELM_HERE = command -v helm >/dev/null || $(BIN)/python -m tests.kubernetes helm \
	|| echo "Helm is not here and was not built: tests that render the chart will be skipped."

test: $(STAMP)
	@$(JAVA)
	$(SUITE) fast

test-all: $(STAMP)
	@$(JAVA)
	@$(HELM_HERE)
	$(SUITE) all

test-kubernetes: $(STAMP)
	$(BIN)/python -m tests.kubernetes test

# Apache Pulsar, for tests of the client against it. On Debian Maven is installed as root.
pulsar: $(STAMP)
	$(BIN)/python -m tests.apache_pulsar || { apt-get update -qq && apt-get install -qq --no-install-recommends maven; \
		$(BIN)/python -m tests.apache_pulsar; }

kafka: $(STAMP)
	$(BIN)/python -m benchmarks.kafka || { apt-get update -qq && apt-get install -qq --no-install-recommends maven; \
		$(BIN)/python -m benchmarks.kafka; }

test-pulsar: pulsar
	$(BIN)/python -m pytest -q tests/client/test_apache_pulsar.py

image: $(STAMP)
	$(BIN)/python -m container $(if $(IMAGE),--name $(IMAGE)) $(if $(BUILDER),--builder $(BUILDER)) $(if $(EXTRAS),--extras $(EXTRAS))

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m page $$(grep -rl --include='test_*.py' mark.page tests)  # all 11,000 tests take longer to collect

bench: $(STAMP)
	$(BIN)/python -m $(if $(CHECK),benchmarks.guard,benchmarks) $(BENCH)

bench-peers: pulsar kafka
	$(BIN)/python -m benchmarks.peers $(BENCH)

simulate: $(STAMP)
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --cores $(CORES) $(if $(FRESH),--fresh) $(if $(BRANCHES),--branches)

clean:
	rm -rf $(VENV) demo-data demo-spark-data demo-tiered-data .pytest_cache .mypy_cache .ruff_cache .hypothesis
