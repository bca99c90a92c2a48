"""Programs that stand before the system's while a recipe or the tests run: what they would install is there already.

What is not there is written to ``UNMET`` and the program fails: tests without their packages are no verdict.
"""

from __future__ import annotations

UNMET = "run/shell/unmet"
_MARK = f"""unmet() {{ echo "$*" >> /{UNMET}; echo "$*: not here" >&2; exit 97; }} 2> /dev/null
"""
_REAL = """rest=":$PATH:"; rest=${rest//:\\/run\\/given\\/bin:/:}; rest=${rest#:}; rest=${rest%:}
"""
_PYTHON = f"""#!/bin/bash
[[ $1 == -m && $2 == pip && -z $RL_REAL ]] && {{ shift 2; exec pip "$@"; }}
{_REAL}real=$(PATH=$rest command -v "${{0##*/}}") || exit 127
exec "$real" "$@"
"""
_PIP = f"""#!/bin/bash
{_MARK}for word; do [[ $word != -* ]] && break; done
case $word in
  install) python3 -I /run/given/bin/installed.py "$@" || unmet "pip $*";;
  uninstall|download|wheel) unmet "pip $*";;
  *) export RL_REAL=1; exec python3 -m pip "$@";;
esac
"""
_APT = f"""#!/bin/bash
{_MARK}installs=
for word; do
  case $word in
    install) installs=1;;
    -*) ;;
    *) name=${{word%%[=/]*}}
       [[ -z $installs ]] || grep -qxF -- "$name" /run/given/bin/packages || command -v "$name" > /dev/null ||
         unmet "apt-get install $word";;
  esac
done
exit 0
"""
# Options of uv that are known; another one would change what is run, so it is refused.
_UV_OPTIONS = f"""{_MARK}options() {{
  used=$#
  while [[ $1 == -* ]]; do case $1 in
    -w|--with|--from) IFS=, read -ra wanted <<< "$2"; pip -q install "${{wanted[@]}}" || exit 97; shift 2;;
    --with=*|--from=*) IFS=, read -ra wanted <<< "${{1#*=}}"; pip -q install "${{wanted[@]}}" || exit 97; shift;;
    --with-requirements) pip -q install -r "$2" || exit 97; shift 2;;
    -p|--python|--index-url|--extra-index-url|--index|--cache-dir|--color|--index-strategy) shift 2;;
    --python=*|--index-url=*|--extra-index-url=*|--index=*|--color=*) shift;;
    -q|-qq|--quiet|-v|--verbose|-n|--no-cache|--isolated|--no-project|--offline|--refresh) shift;;
    --no-config|--no-progress|--native-tls|--active|--no-sync|--frozen|--managed-python) shift;;
    --system|-U|--upgrade|--dev|--seed|--clear) shift;;
    --) shift; break;;
    *) unmet "uv $1";;
  esac; done
  used=$((used - $#))
}}
"""
_UVX = f"""#!/bin/bash
{_UV_OPTIONS}options "$@"; shift $used
program=${{1%%@*}}; shift
command -v "$program" > /dev/null || unmet "uvx $program"
exec "$program" "$@"
"""
_UV = f"""#!/bin/bash
{_UV_OPTIONS}action=$1; shift
case $action in
  run) options "$@"; shift $used; [[ $1 == *.py ]] && exec python3 "$@"
       command -v "$1" > /dev/null || unmet "uv run $1"; exec "$@";;
  tool) what=$1; shift; [[ $what == run ]] && exec uvx "$@"
        [[ $what == install ]] || unmet "uv tool $what"
        options "$@"; shift $used; exec pip install "$@";;
  pip) exec pip "$@";;
  add) options "$@"; shift $used; exec pip install "$@";;
  venv) options "$@"; shift $used; made=${{1:-.venv}}
        rm -rf "$made"; mkdir -p "$made/bin"; : > "$made/bin/activate";;
  init|python|self|cache|--version|version) exit 0;;
  *) unmet "uv $action $*";;
esac
"""
_INSTALLED = """import re, sys
from importlib.metadata import PackageNotFoundError, version

VALUES = {"-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--timeout", "--default-timeout", "--retries",
          "--cache-dir", "--progress-bar", "--trusted-host", "--root-user-action", "--python", "-p", "--log"}

def has(words):
    rest = iter(words)
    for word in rest:
        option, _, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if option in ("-r", "--requirement"):
            lines = open(value or next(rest)).read().splitlines()
            lines = [line for line in (re.sub(r"(^|\\\\s)#.*", "", line).strip() for line in lines) if line]
            if not has(lines):
                return False
        elif option in VALUES:
            value or next(rest)
        elif option in ("-e", "--editable", "-c", "--constraint", "-t", "--target", "--prefix", "--root"):
            return False
        elif not word.startswith("-"):
            found = re.match(r"([A-Za-z0-9][\\\\w.-]*)(\\\\[[^]]*\\\\])?\\\\s*(==\\\\s*([^\\\\s;,*]+)$)?", word)
            if not found or "/" in word.partition(";")[0]:
                return False
            if found[1].lower() in ("pip", "setuptools", "wheel", "uv") or ";" in word:
                continue
            try:
                here = version(found[1])
            except PackageNotFoundError:
                return False
            if found[4] and here != found[4]:
                return False
    return True

words = sys.argv[1:]
sys.exit(not has(words[words.index("install") + 1:]))
""".replace("\\\\", "\\")

SHIMS = {
    "uvx": _UVX,
    "uv": _UV,
    "pip": _PIP,
    "pip3": _PIP,
    "python": _PYTHON,
    "python3": _PYTHON,
    "apt-get": _APT,
    "apt": _APT,
    "sudo": '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nexec "$@"\n',
    # What is fetched with it is uv's installer, which is piped into a shell.
    "curl": """#!/bin/bash
case "$*" in *astral.sh/uv*) echo :; exit 0;; esac
exec /usr/bin/curl "$@"
""",
    "installed.py": _INSTALLED,
}
"""By name, in ``/run/given/bin``, beside ``packages``: the names that ``apt-get`` may install."""
