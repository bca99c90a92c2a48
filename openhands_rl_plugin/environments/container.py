"""A container that another program has made and owns: commands and files by nothing but its ``exec``."""

from __future__ import annotations

import base64
import errno
import json
import os
import re
import shlex
import socket
import threading

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.core.messages import whole_text
from openhands_rl_plugin.environments.workspace.shell import MAX_FILE_BYTES, MAX_LISTED, CommandResult, FileKind
from openhands_rl_plugin.environments.workspace.supervisor import SCRIPT
from openhands_rl_plugin.environments.workspace.task_workspace import ContainerPlace

LONGEST_LINE = 64 * 1024**2
"""Bytes of a request or a reply."""
_SLACK = 30.0
"""Seconds that the owner has beyond a command's own limit, to reply."""
MOST_SHOWN = 64 * 1024
"""Bytes from the beginning, and from the end, of an output."""
PIECE = 64 * 1024
"""Bytes that one command carries: programs take 128 KiB of one argument."""
_MARK = "openhands-rl-answer"  # owners add lines, and differ in how they report an exit code
_NEEDED = "base64 cat head mkdir mv rm tail tee timeout tr wc"

# Job control gives the command a process group of its own, which can be interrupted and killed.
_RUN = rf"""
d=${{BASH_SOURCE%/*}} limit=$1 start=$2
cwd=$start
[[ -s $d/cwd ]] && {{ IFS= read -r -d '' cwd < "$d/cwd" || :; }}
before=$(wc -c < "$d/output") seen=$(cat "$d/seen") why=none began=$SECONDS
rm -f "$d/new" "$d/new.cwd"
set -m
timeout -s KILL "${{limit:-999999}}" bash -c "$(<"$d/script")" \
bash "$d/state" "$d/command" "$cwd" "$start" "$d/new" </dev/null >>"$d/output" 2>&1 &
group=$!
echo "$group" | tee "$d/running" >> "$d/groups"
wait "$group" 2>/dev/null
code=$?
rm -f "$d/running"
[[ $limit && $code == 137 ]] && (( SECONDS - began >= limit )) && {{ why=time; kill -KILL -- "-$group"; }} 2>/dev/null
if [[ $why == none && $(tail -n 1 "$d/new" 2>/dev/null) == "#complete" && -s $d/new.cwd ]]; then
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
echo "$code $why"
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
else echo missing; echo
fi
"""


def end(folder: str) -> str:
    """Ends the command that runs, and removes the folder. What runs in the background goes on: it is the work's."""
    running = shlex.quote(f"{folder}/running")
    return f'group=$(cat {running} 2>/dev/null) && kill -KILL -- "-$group"; rm -rf {shlex.quote(folder)}'


def _piped(data: str | bytes) -> str:
    raw = data.encode() if isinstance(data, str) else data
    return f"printf %s {base64.b64encode(raw).decode()} | base64 -d"


SECONDS = 60.0
"""Of what is no command of the agent."""


class ContainerShell:
    """``cd``, variables, functions and background processes last from command to command. Thread-safe.

    The first and the last 64 KiB of an output are shown. ``start``: the directory in which commands begin.
    ``failure``: how the container, or the session's folder in it, failed last; empty where neither did.
    """

    def __init__(self, place: ContainerPlace) -> None:
        """Makes the session's folder. Raises ``InfrastructureError``, also for an image without a program it needs."""
        self.container = place
        self.failure = ""
        self._one_at_a_time = threading.Lock()
        self._folder = folder = shlex.quote(place.folder)
        missing = '{ echo "the image has no $each"; exit 1; }'
        (self.start,) = self._asked(
            f'for each in {_NEEDED}; do command -v "$each" >/dev/null || {missing}; done\n'
            f"pwd && umask 077 && mkdir {folder} && cd {folder} && : > output && : > groups && echo 0 > seen\n"
            f"{_piped(SCRIPT)} > script && {_piped(_RUN)} > run"
        )

    def run(self, command: str, *, timeout: float | None) -> CommandResult:
        """Run ``command`` for at most ``timeout`` seconds; then its processes are killed.

        Raises ``InfrastructureError``.
        """
        with self._one_at_a_time:
            written = self.put(whole_text(command).encode(errors="surrogateescape"), "command")
            limit = "" if timeout is None else str(max(1, round(timeout)))
            run = shlex.join(["bash", f"{self.container.folder}/run", limit, self.start])
            lines = self._asked(f"{written} && {run} 2>/dev/null", None if timeout is None else timeout + SECONDS)
        try:
            ended, cwd, *parts = lines
            code, why = ended.split()
            where, _, python = _decoded(cwd).partition("\0")
            return CommandResult(
                output=_shown(*parts[3:]),
                earlier=_shown(*parts[:3]),
                exit_code=None if why == "time" else int(code),
                timed_out=why == "time",
                cwd=where,
                python=python.strip(),
            )
        except (ValueError, TypeError) as error:
            raise self._failed("the container's answer to a command is none of the session's") from error

    def put(self, data: bytes, name: str) -> str:
        """Write a file of the session's folder, up to its last piece, which the command that is returned writes.

        Raises ``InfrastructureError``.
        """
        pieces = [_piped(data[at : at + PIECE]) for at in range(0, len(data), PIECE)] or [_piped(b"")]
        *most, last = [f"{each} {'>>' if at else '>'} {self._folder}/{name}" for at, each in enumerate(pieces)]
        for command in most:
            self._asked(command)
        return last

    def interrupt(self) -> None:
        """Send Ctrl-C (SIGINT) to the command that is running. Raises ``InfrastructureError``."""
        self.ask(f'group=$(cat {self._folder}/running 2>/dev/null) && kill -INT -- "-$group"')

    def restart(self) -> None:
        """End all that commands started, but for what left its process group, and forget the shell's state."""
        kill = 'while read -r group; do kill -KILL -- "-$group"; done < groups'
        self.ask(f"cd {self._folder} && {kill}; rm -f state cwd; : > groups")

    def close(self) -> None:
        """End the command that is running, and remove what is the session's own. What runs in the background stays."""
        self.ask(end(self.container.folder))

    def ask(self, command: str, timeout: float | None = SECONDS) -> tuple[int, list[str]]:
        """The exit code and the lines of one command of the session's own. Raises ``InfrastructureError``."""
        marked = f"echo {_MARK}; {{ {command}\n}} </dev/null 2>&1; echo {_MARK} $?"
        try:
            with socket.socket(socket.AF_UNIX) as line:
                line.settimeout(None if timeout is None else timeout + _SLACK)
                line.connect(str(self.container.socket))
                line.sendall(json.dumps({"command": marked, "timeout": timeout}).encode() + b"\n")
                with line.makefile("rb") as replies:
                    reply = json.loads(replies.readline(LONGEST_LINE))
        except OSError as error:
            raise self._failed(f"the container's owner does not answer: {error}") from error
        except ValueError as error:
            raise self._failed("the container's owner ended before a command was answered") from error
        if "error" in reply:
            raise self._failed(f"the container: {reply['error']}")
        found = re.search(rf"^{_MARK}\n(.*)^{_MARK} (\d+)$", "\n".join(reply["stdout"].splitlines()), re.M | re.S)
        if found is None:
            code, printed = reply["return_code"], f"{reply['stdout']}\n{reply['stderr']}".strip().splitlines()
            why = f"exit code {code}: {printed[-1]}" if code and printed else "it was cut on its way"
            raise self._failed(f"the container's answer to a command is none: {why}")
        return int(found[2]), found[1].splitlines()

    def _failed(self, why: str) -> InfrastructureError:
        self.failure = why
        return InfrastructureError(why)

    def _asked(self, command: str, timeout: float | None = SECONDS) -> list[str]:
        code, lines = self.ask(command, timeout)
        if code:
            why = lines[-1] if lines else f"exit code {code}"
            raise self._failed(f"a command of the session failed in the container: {why}")
        return lines


def _shown(size: str, head: str, tail: str) -> str:
    cut = int(size) - 2 * MOST_SHOWN
    return f"{_decoded(head)}\n[... {cut} bytes of output cut ...]\n{_decoded(tail)}" if tail else _decoded(head)


def _decoded(text: str) -> str:
    return base64.b64decode(text).decode(errors="replace")


_KINDS: dict[str, FileKind] = {"d": "directory", "f": "file", "o": "other"}
_NAMES = MAX_LISTED * 100


class ContainerFiles:
    """Reading and writing with the rights of the container's user. Paths are absolute.

    What is at a path is asked once, so that an object is for one use of it. All methods raise ``OSError`` with the
    reason of the container, and ``InfrastructureError``.
    """

    def __init__(self, shell: ContainerShell) -> None:
        self._shell = shell
        self._known: dict[str, tuple[str, bytes]] = {}

    def kind(self, path: str) -> FileKind | None:
        """The kind of the file at ``path``, links followed; ``None`` where there is none."""
        kind = self._look(path)[0]
        return kind if kind in ("file", "directory", "other") else None

    def read(self, path: str) -> bytes:
        """The whole file, of at most 10 MiB."""
        kind, content = self._look(path)
        if kind != "file":
            raise OSError(errno.EINVAL, "not a regular file", path)
        return content

    def entries(self, path: str) -> list[tuple[str, FileKind]]:
        """Names in a directory with their kinds; a symbolic link counts as ``other``."""
        path = f"/{path.strip('/')}"
        root = next((each for each in self._known if path == each or path.startswith(f"{each.rstrip('/')}/")), path)
        within = path[len(root.rstrip("/")) + 1 :]
        found: list[tuple[str, FileKind]] = []
        for entry in self._look(root)[1].split(b"\0")[:-1]:
            kind, name = _KINDS[entry[:1].decode()], os.fsdecode(entry[1:])
            folder, _, last = name.rpartition("/")
            if folder == within:
                found.append((last, kind))
        return found

    def write(self, path: str, data: bytes) -> None:
        """Replace the file's content in place, or make the file and the folders above it."""
        source, target = f"{shlex.quote(self._shell.container.folder)}/uploaded", shlex.quote(path)
        above = shlex.quote(path.rpartition("/")[0] or "/")
        written = self._shell.put(data, "uploaded")
        code, lines = self._shell.ask(f"{written} && mkdir -p {above} && cat {source} > {target} && rm -f {source}")
        if code:
            raise _refused(lines, path)

    def _look(self, path: str) -> tuple[str, bytes]:
        if path not in self._known:
            look = ["bash", "-c", _LOOK, "bash", path, str(MAX_FILE_BYTES), str(_NAMES)]
            code, lines = self._shell.ask(shlex.join(look))
            if code:
                raise _refused(lines, path)
            try:
                kind, content = lines
                found = base64.b64decode(content)
            except ValueError as error:
                raise OSError(errno.EIO, "the container's answer about it is none of the session's", path) from error
            self._known[path] = kind, found
        return self._known[path]


def _refused(lines: list[str], path: str) -> OSError:
    return OSError(errno.EIO, lines[-1].rpartition(": ")[2] if lines else "refused", path)
