#!/usr/bin/env bash
# eval-swetrain-full-rollout.sh OUTPUT_JSONL NUM_WORKERS [OPTION...]
# Grade the patches of a rollout again, into graded/ beside it; needs the rows: DATASET_FILE=rows.jsonl.
#
# A rollout is graded while it runs. Use this for other patches. Further
# options go to `openhands-rl grade`.
BACKEND="${BACKEND:-docker}" # SWE-Gym's rows are graded in their images
. "$(dirname "$0")/common.sh"
grade "$@"
