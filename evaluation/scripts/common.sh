# Shared by the rollout scripts: which program runs, and where config.toml and the rows are. Sourced, not run.
set -euo pipefail

OPENHANDS_RL="${OPENHANDS_RL:-openhands-rl}"
CONFIG="${CONFIG:-config.toml}"

usage() {
    sed -n '2,/^[^#]/{s/^# \{0,1\}//p;}' "$0"
    exit "${1:-0}"
}

# rollout SUITE MODEL NOTE LIMIT MAX_ITER WORKERS RUNS [OPTION...]
rollout() {
    local suite="$1" model="$2" note="$3" limit="$4" iterations="$5" workers="$6" runs="$7"
    shift 7
    exec $OPENHANDS_RL evaluate "$suite" --config "$CONFIG" --llm "$model" --agent "${AGENT:-stock}" \
        --note "v2.2-no-hint-$note" --limit "$limit" --runs "$runs" \
        --set "max_turns=$iterations" "max_workers=$workers" \
        --out "${OUT:-evaluation/evaluation_outputs/outputs}" ${DATASET_FILE:+--dataset-file "$DATASET_FILE"} \
        ${MIRROR:+--mirror "$MIRROR"} ${BACKEND:+--backend "$BACKEND"} "$@"
}

# rollout_eval SUITE LIMIT MODEL [NUM_WORKERS] [N_RUNS] [OPTION...]
rollout_eval() {
    local suite="$1" limit="$2"
    shift 2
    case "${1:-}" in "" | -h | --help) usage ;; esac
    local model="$1" workers=64 runs=1
    shift
    case "${1:-}" in [0-9]*) workers="$1" && shift ;; esac
    case "${1:-}" in [0-9]*) runs="$1" && shift ;; esac
    rollout "$suite" "$model" "${EXP_NAME:-t0}" "$limit" 100 "$workers" "$runs" "$@"
}

# grade OUTPUT_JSONL NUM_WORKERS [OPTION...]: grade the patches of an output.jsonl; verdicts go beside it.
grade() {
    case "${1:-}" in "" | -h | --help) usage ;; esac
    local output="$1" workers="${2:?NUM_WORKERS is missing}"
    local folder rows="${DATASET_FILE:?set DATASET_FILE to the rows of the data set}"
    shift 2
    folder="$(dirname "$output")"
    if [ ! -e "$folder/predictions.jsonl" ]; then # of OpenHands' own harness
        $OPENHANDS_RL import "$output" --format output-jsonl --into "$folder/imported"
        $OPENHANDS_RL export "$folder/imported" --format predictions --out "$folder/predictions.jsonl"
    fi
    exec $OPENHANDS_RL grade "$folder/predictions.jsonl" --instances "$rows" --workers "$workers" --out "$folder/graded" \
        ${MIRROR:+--mirror "$MIRROR"} ${BACKEND:+--backend "$BACKEND"} "$@"
}
