"""What runs in a container of another program, which needs bash and the programs that ``begin`` names.

A session's folder there has ``script`` (one command, as in ``workspace.supervisor``), ``run`` (starts it and tells what
came of it), ``output`` (what all commands wrote, and what runs in the background still writes), ``state`` and ``cwd``
of the shell, ``running`` (the process group of the command that runs) and ``groups`` (those of all).
"""

from __future__ import annotations

import base64
import shlex

from openhands_rl_plugin.environments.workspace.supervisor import LONG_STATE, SCRIPT

MOST_WRITTEN = 512 * 1024**2
"""Bytes that one command may write to its output, which are kept in the container; then it is ended."""
MOST_SHOWN = 64 * 1024
"""Bytes from the beginning, and from the end, of an output."""
PIECE = 64 * 1024
"""Bytes that one command carries: programs take 128 KiB of one argument."""
_MARK = "openhands-rl-answer"

# Job control gives the command a process group of its own, which can be interrupted and killed.
_RUN = rf"""
d=${{BASH_SOURCE%/*}} limit=$1 start=$2
cwd=$start
[[ -s $d/cwd ]] && {{ IFS= read -r -d '' cwd < "$d/cwd" || :; }}
before=$(wc -c < "$d/output") seen=$(cat "$d/seen") long= why=
[[ -r $d/state ]] && (( $(wc -c < "$d/state") > {LONG_STATE} )) && long=long
rm -f "$d/new" "$d/new.cwd" "$d/why"
set -m
bash -c "$(<"$d/script")" bash "$d/state" "$d/command" "$cwd" "$start" "$d/new" "$long" </dev/null >>"$d/output" 2>&1 &
group=$!
echo "$group" | tee "$d/running" >> "$d/groups"
( began=$SECONDS
while sleep 0.5; do
[[ $limit ]] && (( SECONDS - began >= limit )) && why=time
(( $(wc -c < "$d/output") - before > {MOST_WRITTEN} )) && why=output
[[ $why ]] && {{ echo "$why" > "$d/why"; kill -KILL -- "-$group"; break; }}
done ) </dev/null >/dev/null 2>&1 &
watch=$!
wait "$group" 2>/dev/null
code=$?
kill -KILL -- "-$watch" 2>/dev/null
rm -f "$d/running"
[[ -s $d/why ]] && why=$(<"$d/why")
if [[ ! $why && $(tail -n 1 "$d/new" 2>/dev/null) == "#complete" && -s $d/new.cwd ]]; then
mv -f "$d/new" "$d/state"; mv -f "$d/new.cwd" "$d/cwd"
fi
size=$(wc -c < "$d/output")
echo "$size" > "$d/seen"
part() {{ tail -c "+$(($1 + 1))" "$d/output" | head -c "$2" | base64 | tr -d '\n'; echo; }}
ends() {{
local size=$(($2 - $1)) half={MOST_SHOWN}
echo "$size"
if (( size <= 2 * half )); then part "$1" "$size"; echo; else part "$1" "$half"; part "$(($2 - half))" "$half"; fi
}}
echo "$code ${{why:-none}}"
{{ [[ -s $d/cwd ]] && cat "$d/cwd" || printf '%s\0' "$start"; }} | base64 | tr -d '\n'; echo
ends "$seen" "$before"
ends "$before" "$size"
"""

_LOOK = r"""
path=$1 most=$2 names=$3
kind() { if [[ -d $1 && ! -L $1 ]]; then printf d; elif [[ -f $1 && ! -L $1 ]]; then printf f; else printf o; fi; }
if [[ -d $path ]]; then
shopt -s nullglob dotglob
[[ -r $path && -x $path ]] || { echo "$path: Permission denied" >&2; exit 1; }
echo directory
list() {
local entry below
for entry in "${path%/}"/*; do
kind "$entry"; printf '%s\0' "${entry#"${path%/}"/}"
[[ -d $entry && ! -L $entry ]] && for below in "$entry"/*; do
kind "$below"; printf '%s\0' "${below#"${path%/}"/}"
done
done
}
list | head -c "$names" | base64 | tr -d '\n'; echo
elif [[ -f $path ]]; then
size=$(wc -c < "$path") || exit 1
(( size <= most )) || { echo "larger than $((most >> 20)) MiB" >&2; exit 1; }
echo file; base64 < "$path" | tr -d '\n'; echo
elif [[ -e $path ]]; then echo other; echo
else echo missing; [[ -d ${path%/*}/ ]] && echo parent || echo
fi
"""


def marked(command: str) -> str:
    """``command``, with its output of both kinds and its exit code in what ``answer`` reads.

    What an owner tells of an exit code, and which lines it adds, differs from one kind of container to another.
    """
    return f"echo {_MARK}; {{ {command}\n}} </dev/null 2>&1; echo {_MARK} $?"


def answer(printed: str) -> tuple[int, list[str]]:
    """The exit code of a ``marked`` command, and its lines. Raises ``ValueError`` where it was cut on its way."""
    lines = printed.splitlines()
    start = lines.index(_MARK)
    for at in range(len(lines) - 1, start, -1):
        mark, _, code = lines[at].partition(" ")
        if mark == _MARK:
            return int(code), lines[start + 1 : at]
    raise ValueError("no end")


def begin(folder: str) -> str:
    """Makes the session's folder, for its user alone; fails where a program is missing, naming it."""
    needed = "base64 cat head mkdir mv rm sleep tail tee tr wc"
    quoted = shlex.quote(folder)
    missing = '{ echo "the image has no $each"; exit 1; }'
    return (
        f'for each in {needed}; do command -v "$each" >/dev/null || {missing}; done\n'
        f"umask 077 && mkdir {quoted} && cd {quoted} && : > output && : > groups && echo 0 > seen\n"
        f"{_decoded(SCRIPT)} > script && {_decoded(_RUN)} > run && pwd"
    )


def begin_anew(folder: str) -> str:
    """``begin`` where the folder, or what a command left of it, may be."""
    return f"rm -rf {shlex.quote(folder)}\n{begin(folder)}"


def put(data: bytes, file: str, *, first: bool) -> str:
    """Writes a ``PIECE`` of a file of the session's folder, after what is there unless it is the ``first``."""
    return f"{_decoded(data)} {'>' if first else '>>'} {shlex.quote(file)}"


def run(folder: str, start: str, limit: float | None) -> str:
    """Runs what is in ``command``; ``limit`` in seconds."""
    whole = "" if limit is None else str(max(1, round(limit)))
    return f"{shlex.join(['bash', f'{folder}/run', whole, start])} 2>/dev/null"


def interrupt(folder: str) -> str:
    """Sends Ctrl-C to the command that runs."""
    running = shlex.quote(f"{folder}/running")
    return f'group=$(cat {running} 2>/dev/null) && kill -INT -- "-$group"'


def restart(folder: str) -> str:
    """Ends all process groups of the session, and forgets the shell's state."""
    kill = 'while read -r group; do kill -KILL -- "-$group"; done < groups'
    return f"cd {shlex.quote(folder)} && {kill}; rm -f state cwd; : > groups"


def end(folder: str) -> str:
    """Ends the command that runs, and removes the folder. What runs in the background goes on: it is the work's."""
    running = shlex.quote(f"{folder}/running")
    return f'group=$(cat {running} 2>/dev/null) && kill -KILL -- "-$group"; rm -rf {shlex.quote(folder)}'


def look(path: str, *, most: int, names: int) -> str:
    """Tells what is at ``path``: a file of at most ``most`` bytes with its content, or the names in a folder and in
    those below it, ``names`` bytes of them."""
    return shlex.join(["bash", "-c", _LOOK, "bash", path, str(most), str(names)])


def place_at(folder: str, path: str) -> str:
    """Writes what is in ``uploaded`` to ``path``, whose mode and owner stay; folders above it are made."""
    source, target = shlex.quote(f"{folder}/uploaded"), shlex.quote(path)
    above = shlex.quote(path.rpartition("/")[0] or "/")
    return f"mkdir -p {above} && cat {source} > {target} && rm -f {source}"


def _decoded(data: str | bytes) -> str:
    raw = data.encode() if isinstance(data, str) else data
    return f"printf %s {base64.b64encode(raw).decode()} | base64 -d"
