#!/usr/bin/env bash
# eval-swetrain-full-rollout.sh OUTPUT_JSONL NUM_WORKERS [OPTION...]
# Grade the patches of a rollout again, into graded/ beside it; needs the rows: DATASET_FILE=rows.jsonl.
#
# A rollout is graded while it runs; this is for patches of others and for another back end (BACKEND=docker). Further
# options go to `openhands-rl grade`.
. "$(dirname "$0")/common.sh"
case "${1:-}" in "" | -h | --help) usage ;; esac
output="$1" workers="${2:?NUM_WORKERS is missing}"
shift 2
grade "$output" "$workers" "${DATASET_FILE:?set DATASET_FILE to the rows of the data set}" "$@"
