#!/usr/bin/env bash
# summarize_outputs.sh RUN... [--out DIR]
# Resolve rate with intervals, outcomes, cost and turns of runs; RUN is a folder or an output.jsonl.
. "$(dirname "$0")/common.sh"
case "${1:-}" in "" | -h | --help) usage ;; esac
exec $OPENHANDS_RL evaluate --report "$@"
