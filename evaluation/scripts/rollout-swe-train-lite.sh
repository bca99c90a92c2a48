#!/usr/bin/env bash
# rollout-swe-train-lite.sh MODEL EXP_NAME [OPTION...]
# Roll out once on SWE-Gym Lite.
#
# MODEL is a section [llm.MODEL] of config.toml (CONFIG=...). Further options go to `openhands-rl evaluate`, for example
# --dry-run. Variables: AGENT, BACKEND, DATASET_FILE (rows instead of a download), MIRROR, OUT.
BACKEND="${BACKEND:-docker}" # SWE-Gym's rows are graded in their images
. "$(dirname "$0")/common.sh"
case "${1:-}" in "" | -h | --help) usage ;; esac
model="$1" exp="${2:?EXP_NAME is missing, for example train-t0}"
shift 2
rollout swe-gym-lite "$model" "$exp" 2000 50 "${NUM_WORKERS:-64}" 1 "$@"
