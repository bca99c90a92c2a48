#!/usr/bin/env bash
# rollout-eval-verified.sh MODEL [NUM_WORKERS=64] [N_RUNS=1] [OPTION...]
# Evaluate on SWE-bench Verified.
#
# MODEL is a section [llm.MODEL] of config.toml (CONFIG=...). Further options go to `openhands-rl evaluate`, for example
# --dry-run. Variables: AGENT, BACKEND, DATASET_FILE (rows instead of a download), MIRROR, OUT.
. "$(dirname "$0")/common.sh"
rollout_eval swe-bench-verified 500 "$@"
