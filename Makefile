# `make demo` and `make test` make their own environment the first time (.ci/setup) and start at once the next time.
# CPU=1 the first time: PyTorch without CUDA, 1 GB to download instead of 3, for a machine without a GPU.
# Options go into ARGS:  make demo ARGS=--tiny    make test ARGS="-k storage"    A Python of your choice: make PYTHON=...
.DEFAULT_GOAL := help
.PHONY: help setup demo docs reference pictures test test-v1 test-v1-matrix test-slow test-gpu test-vllm test-peers test-containers lint lint-v1 format clean
.PHONY: hosts training workspaces others conversations processes
.DELETE_ON_ERROR:

unexport PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME VIRTUAL_ENV
# LiteLLM asks for a price list on the network otherwise.
export LITELLM_LOCAL_MODEL_COST_MAP := True

BIN := .venv/bin
READY := .venv/.ready
V1 := .venv-v1/bin
READY_V1 := .venv-v1/.ready

READY_DOCS := .venv-docs/.ready
# Pages that are made from the source, by .ci/docs/generate.py.
COG := -I .ci/docs -p "import generate" $(shell grep -rl '\[\[\[cog' docs)

# Four processes of about equal length, two a core: tests also wait. Only the first imports OpenHands, and only the second
# PyTorch: seven seconds each.
hosts := tests/hosts tests/golden tests/docs tests/contrib/studio tests/cli/test_starting_config.py $(addprefix tests/trajectories/exchange/test_,llm_completions.py v0_events.py)
training := tests/training tests/models tests/rewards tests/test_flow.py tests/test_road.py tests/core/templates/test_chat_text.py tests/rollout/strategies/test_verifier_search.py tests/session $(addprefix tests/apps/,agent loop) $(addprefix tests/cli/,train test_chat.py test_loop_command.py) $(addprefix tests/contrib/,improve trainers watch)
workspaces := $(filter-out $(hosts) $(training),$(wildcard tests/contrib/[!_]*)) tests/environments tests/evals tests/evaluation
others := $(addprefix --ignore=,$(hosts) $(training)) $(sort $(filter-out $(hosts) $(training) $(workspaces) tests/contrib tests/helpers tests/__pycache__ tests/conftest.py tests/budget.json,$(wildcard tests/*)))
PARTS := hosts training workspaces others
# The output of each in one piece, where make can.
SYNC := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

# The tests that have something to show with OpenHands V1; all others run with V0. Two processes of about equal length.
processes := $(addprefix tests/hosts/v1/test_,agent_server.py critic.py run_command.py) 'tests/golden/test_golden.py::test_today_is_as_the_golden_file[v1_sessions]' tests/hosts/shared tests/evals/runs/test_evaluation.py tests/apps/rollout tests/contrib/rollouts tests/contrib/repair/test_repair_demonstrations.py tests/config/test_host.py tests/test_imports.py tests/docs/test_plugins_page.py
conversations := $(sort $(filter-out $(processes),$(wildcard tests/hosts/v1/test_*.py)))
PARTS_V1 := processes conversations

help: ## This list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup: $(READY) ## Make the environment

demo: $(READY) ## Train a small model in the embedded shop (ARGS="--task repair": on code) and show the report
	$(BIN)/openhands-rl demo $(ARGS)

# In .venv-docs, 115 MB, from the same lock; nothing else is fetched, then or when a page is read.
docs: $(READY_DOCS) ## Build the documentation into build/docs
	.venv-docs/bin/zensical build --strict --clean -f .zensical.toml
	.venv-docs/bin/python .ci/docs/check.py build/docs

reference: $(READY) ## Write the pages that are made from the source
	$(BIN)/cog -r $(COG)

pictures: $(READY) ## Draw the studio's pictures: ARGS="--run runs/demo"
	$(BIN)/python .ci/docs/pictures.py $(ARGS)

# Side by side. ARGS, as all options of pytest, goes to one process with all tests.
test: $(READY) ## Check the style and the types, run the fast tests
ifdef ARGS
	$(BIN)/pytest $(ARGS)
else
	@$(MAKE) -j $(SYNC) lint $(PARTS)
endif

# In .venv-v1, from the same lock; another 3 GB unless CPU=1.
test-v1: $(READY_V1) ## Check the types of the host for OpenHands V1, run its tests
ifdef ARGS
	$(V1)/pytest $(conversations) $(processes) $(ARGS)
else
	@$(MAKE) -j $(SYNC) lint-v1 $(PARTS_V1)
endif

$(PARTS): $(READY)
	$(BIN)/pytest $($@)

$(PARTS_V1): $(READY_V1)
	$(V1)/pytest $($@)

# Makes .peers/sdk-*, half a gigabyte each; ARGS="1.34.0 newest" chooses some.
test-v1-matrix: $(READY) ## Test OpenHands V1 with old and new releases of its SDK
	.ci/sdk-matrix $(ARGS)

test-slow: $(READY) $(READY_V1) ## Run the tests that need more than ten seconds each
	$(BIN)/pytest -m slow $(ARGS)
	$(V1)/pytest -m slow tests/hosts/v1 $(ARGS)

# On a machine with a CUDA GPU; each test says what it needs where it is skipped. Four processes: kernels are compiled side by side.
test-gpu: $(READY) ## Run the tests that need a GPU
	OMP_NUM_THREADS=4 $(BIN)/pytest -m gpu -n 4 --dist worksteal --durations 0 --durations-min 1 $(ARGS)

# Into an environment of its own, about 6 GB, unless OPENHANDS_RL_VLLM_PYTHON names one.
test-vllm: $(READY) ## Publish to a real vLLM on this machine's processor
	OPENHANDS_RL_VLLM_PYTHON="$${OPENHANDS_RL_VLLM_PYTHON:-install}" $(BIN)/pytest -m slow tests/models/adapters/test_vllm.py $(ARGS)

# Makes .peers, up to 10 GB; ARGS="openenv extras" chooses some.
test-peers: $(READY) ## Test against OpenEnv, AgentGym, verifiers, Ray, swebench, vLLM and other trainers
	.ci/peers $(ARGS)

# Docker, or podman, which is started for it; the script says what to install.
test-containers: $(READY) ## Test the Docker back end against a real engine
	.ci/containers $(ARGS)

lint: $(READY) ## Check the style and the types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyrefly check
	$(BIN)/cog --check $(COG)

lint-v1: $(READY_V1)
	$(BIN)/pyrefly check --config .ci/pyrefly-v1.toml

format: $(READY) ## Format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## Remove the environment
	rm -rf .venv .venv-v1 .venv-docs .uv .peers .containers

$(READY): pyproject.toml uv.lock .ci/setup
	@PYTHON="$(PYTHON)" .ci/setup
	@touch $@

$(READY_V1): pyproject.toml uv.lock .ci/setup $(READY)
	@PYTHON="$(PYTHON)" .ci/setup v1
	@touch $@

$(READY_DOCS): pyproject.toml uv.lock .ci/setup
	@PYTHON="$(PYTHON)" .ci/setup docs
	@touch $@
