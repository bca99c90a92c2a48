# Sourced by the official scripts as /opt/miniconda3/bin/activate; has to work under `set -eu`.
_shim_use() {
    export CONDA_DEFAULT_ENV="$1" CONDA_PREFIX="/conda/envs/$1" CONDA_SHLVL=1
    export PATH="/opt/miniconda3/shims:$CONDA_PREFIX/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/root/.local/bin"
    hash -r
}

conda() {
    case "${1-}" in
    activate) _shim_use "${2-base}" ;;
    deactivate) unset CONDA_DEFAULT_ENV CONDA_PREFIX ;;
    init | config) ;;
    *) /opt/miniconda3/host-python -Es /opt/miniconda3/shim/installing.py conda "$@" ;;
    esac
}
