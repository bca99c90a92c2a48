#!/usr/bin/env bash
# rollout-eval-verified.sh MODEL [NUM_WORKERS=64] [N_RUNS=1] [OPTION...]
# Evaluate on SWE-bench Verified.
#
# MODEL is a section [llm.MODEL] of config.toml (CONFIG=...). Further options go to `openhands-rl evaluate`, for example
# --dry-run. Variables: AGENT, BACKEND, DATASET_FILE (rows instead of a download), MIRROR, OUT.
. "$(dirname "$0")/common.sh"
case "${1:-}" in "" | -h | --help) usage ;; esac
model="$1"
shift
workers=64 runs=1
case "${1:-}" in [0-9]*) workers="$1" && shift ;; esac
case "${1:-}" in [0-9]*) runs="$1" && shift ;; esac
rollout swe-bench-verified "$model" "${EXP_NAME:-t0}" 500 100 "$workers" "$runs" "$@"
