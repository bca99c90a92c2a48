#!/usr/bin/env bash
# eval-swebench-lite.sh OUTPUT_JSONL NUM_WORKERS [OPTION...]
# Grade the patches of a rollout again, into graded/ beside it; needs the rows: DATASET_FILE=rows.jsonl.
#
# A rollout is graded while it runs. Use this for other patches, or for another back end (BACKEND=docker). Further
# options go to `openhands-rl grade`.
. "$(dirname "$0")/common.sh"
grade "$@"
