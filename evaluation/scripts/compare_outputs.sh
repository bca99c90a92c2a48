#!/usr/bin/env bash
# compare_outputs.sh RUN_A RUN_B [--out DIR]
# Compare two evaluations over the same tasks, with a p-value.
. "$(dirname "$0")/common.sh"
case "${1:-}" in "" | -h | --help) usage ;; esac
exec $OPENHANDS_RL evaluate --compare "$@"
