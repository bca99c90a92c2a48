#!/usr/bin/env bash
# rollout-swe-train-full.sh MODEL EXP_NAME [N_RUNS=20] [OPTION...]
# Roll out on SWE-Gym, for training data.
#
# MODEL is a section [llm.MODEL] of config.toml (CONFIG=...). Further options go to `openhands-rl evaluate`, for example
# --dry-run. Variables: AGENT, BACKEND, DATASET_FILE (rows instead of a download), MIRROR, OUT.
BACKEND="${BACKEND:-docker}" # SWE-Gym's rows are graded in their images
. "$(dirname "$0")/common.sh"
case "${1:-}" in "" | -h | --help) usage ;; esac
model="$1" exp="${2:?EXP_NAME is missing, for example train-t0}"
shift 2
runs=20
case "${1:-}" in [0-9]*) runs="$1" && shift ;; esac
rollout swe-gym "$model" "$exp" 3000 50 "${NUM_WORKERS:-64}" "$runs" "$@"
