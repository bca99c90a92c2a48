#!/bin/sh
# Programs that the official scripts call and that need conda or root; each is a link to this file.
pip() { exec /opt/miniconda3/host-python -Es /opt/miniconda3/shim/installing.py pip "$@"; }

case "${0##*/}" in
pip | pip3) pip "$@" ;;
python | python3)
    if [ "${1-}" = -m ] && [ "${2-}" = pip ]; then shift 2 && pip "$@"; fi
    exec "${CONDA_PREFIX:-/conda/envs/testbed}/bin/python" "$@"
    ;;
tox)
    # Golds of sphinx: tox links the interpreter to another place, where a virtual environment finds no packages.
    while [ "${1---}" != -- ]; do shift; done
    shift
    exec python -X dev -m pytest -rA --durations 25 "$@"
    ;;
pipx)
    [ "${1-}" = install ] || exit 0
    exec /opt/miniconda3/bin/uv tool install "$2"
    ;;
sudo) exec "$@" ;;
*) echo "shim: ${0##*/} $* is left out" >&2 ;;
esac
