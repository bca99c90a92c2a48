# Sourced by the shell that runs the tests (BASH_ENV), before anything of the instance runs. The tests' own shells do
# not source it.
unset BASH_ENV
_guard_code=$(</guard/supervisor.txt)

# The supervisor gets the random word before the markers through a pipe, and nothing of this is traced.
_guard_run() {
    { local -; set +x; } 2>/dev/null
    printf '%s\n' "${PS4-}" | command python -I -S -c "$_guard_code" @PLUGIN@ "$@"
    return "${PIPESTATUS[1]}"
}

_guard_python() {
    { local -; set +x; } 2>/dev/null
    case " $* " in
    *" -m pytest "* | *" -m py.test "*) _guard_run "$@" ;;
    *) command "$@" ;;
    esac
}

if ((BASH_VERSINFO[0] > 4 || (BASH_VERSINFO[0] == 4 && BASH_VERSINFO[1] >= 4))); then
    pytest() { { local -; set +x; } 2>/dev/null; _guard_run pytest "$@"; }
    py.test() { { local -; set +x; } 2>/dev/null; _guard_run py.test "$@"; }
    python() { { local -; set +x; } 2>/dev/null; _guard_python python "$@"; }
    python3() { { local -; set +x; } 2>/dev/null; _guard_python python3 "$@"; }
fi
