"""Reads a patch (its files, its added lines, reasons to refuse it), and applies one in a box.

What changed is compared with what the patch names. What graded tests are made of is the row's: files in their folders,
every ``conftest.py``, settings of pytest, modules in the place of Python's and compiled files are as the row and its
set-up have them, whatever a patch does to them, unless the row's own fix changes them too.
"""

from __future__ import annotations

import re
import secrets
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NamedTuple

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.core.files import is_gits_own
from openhands_rl_plugin.evals.swe.instances import Box, Instance, VerdictKind

MAX_PATCH = 16 * 2**20
"""Bytes. Larger patches contain generated files, not a fix."""

_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_GIT = re.compile(r'diff --git (?:a/(.*) b/(.*)|"a/(.*)" "b/(.*)")\r?$')
_SECTIONS = ("GIT binary patch", "rename from ", "new file mode ", "deleted file mode ", "old mode ")
_ESCAPED = re.compile(rb"\\([0-7]{3}|.)")
_SIGNS = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b'"': b'"', b"\\": b"\\"}


@dataclass
class FilePatch:
    """The part of a patch about one file.

    ``header``: its names in the ``diff --git`` line. ``old`` and ``new``: those above its hunks, ``None`` for the
    missing side of an added or deleted file. ``added``: new lines. ``applies``: whether anything in it can be applied.
    """

    header: tuple[str, ...] = ()
    old: str | None = None
    new: str | None = None
    applies: bool = False
    added: list[str] = field(default_factory=list)


def read_patch(patch: str) -> list[FilePatch]:
    """The parts of a patch, in its order."""
    files: list[FilePatch] = []
    before = after = 0
    hunks = False
    for line in patch.split("\n"):
        if before > 0 or after > 0:
            if line.startswith(("-", "+", " ", "\\")) or not line.strip():
                if line.startswith("+"):
                    files[-1].added.append(line[1:].rstrip("\r"))
                before -= not line.startswith(("+", "\\"))
                after -= not line.startswith(("-", "\\"))
                continue
            before = after = 0
        if match := _GIT.match(line):
            names = (match[1] or _unescaped(match[3] or ""), match[2] or _unescaped(match[4] or ""))
            files.append(FilePatch(header=names))
            hunks = False
        elif line.startswith("--- "):
            if not files or hunks:
                files.append(FilePatch())
            files[-1].old, hunks = _name(line[4:], "a/"), False
        elif line.startswith("+++ ") and files:
            files[-1].new, hunks = _name(line[4:], "b/"), True
        elif files and (match := _HUNK.match(line)):
            files[-1].applies = True
            before, after = (int(number) if number is not None else 1 for number in match.groups())
        elif files and line.startswith(_SECTIONS):
            files[-1].applies = True
    return files


def changed_files(patch: str) -> tuple[str, ...]:
    """The files that a git patch names, by their new names, in its order."""
    return tuple(dict.fromkeys(each.header[1] for each in read_patch(patch) if each.header))


def restored_files(patch: str) -> tuple[str, ...]:
    """The files with hunks that exist before the patch."""
    return tuple(dict.fromkeys(each.old for each in read_patch(patch) if each.old))


def added_files(patch: str) -> tuple[str, ...]:
    """The files with hunks that the patch creates."""
    return tuple(dict.fromkeys(each.new for each in read_patch(patch) if each.new and not each.old))


def touched_files(patch: str) -> frozenset[str]:
    """Every file that the patch changes, adds or deletes, by its old and new name."""
    return frozenset(name for each in read_patch(patch) for name in (*each.header, each.old, each.new) if name)


def refusal(patch: str) -> str | None:
    """Why a patch is refused, in one line; ``None`` for one that may be applied."""
    size = len(patch.encode("utf-8", "surrogatepass"))
    if size > MAX_PATCH:
        return f"the patch has {size / 2**20:.0f} MiB, more than {MAX_PATCH >> 20}"
    if re.search("[\0\ud800-\udfff]", patch):
        return "the patch is not text: it holds zero bytes or invalid Unicode"
    names = touched_files(patch)
    if not names or not any(each.applies for each in read_patch(patch)):
        return "this is not a patch: it has no file with a hunk or binary data (git diff --binary)"
    if inside := next((name for name in sorted(names) if is_gits_own(name)), None):
        return f"the patch writes into git's own files ({inside})"
    return None


def _name(text: str, prefix: str) -> str | None:
    text = text.split("\t")[0].rstrip("\r")
    if len(text) > 1 and text[0] == text[-1] == '"':
        text = _unescaped(text[1:-1])
    return None if text == "/dev/null" else text.removeprefix(prefix)


def _unescaped(text: str) -> str:
    """A name that git quoted: non-ASCII characters are octal bytes."""

    def plain(match: re.Match[bytes]) -> bytes:
        sign = match[1]
        return bytes((int(sign, 8) & 0xFF,)) if len(sign) == 3 else _SIGNS.get(sign, sign)

    return _ESCAPED.sub(plain, text.encode()).decode(errors="replace")


PATCH_INSIDE = "/tmp/patch.diff"

_APPLY = " || ".join(
    f"{command} {PATCH_INSIDE}"
    for command in ("git apply --verbose", "git apply --verbose --reject", "patch --unified --batch --fuzz=5 -p1 -i")
)
"""The official commands, tried in this order; ``patch`` reads no form but unified diffs, as others run commands."""
_APPLY_TIME = 120.0
_LEFT = (".orig", ".rej")
_RUNNERS = {"conftest.py", "pytest.ini", ".pytest.ini", "sitecustomize.py", "usercustomize.py"}
_SETTINGS = {"tox.ini", "setup.cfg", "pyproject.toml"}
_OPTIONS = re.compile(r"pytest|addopts|testpaths|python_(?:files|classes|functions)|pythonpath|confcutdir|\s-p[ =]")
_IMPORTED = sys.stdlib_module_names | {"pytest", "_pytest", "pluggy", "iniconfig", "py", "packaging", "pygments"}
"""Modules that are imported before those of a repository, or by its tests' runner."""
_MOST = 3


class Applied(NamedTuple):
    """``kind`` and ``reason`` of a patch that could not be applied; ``None`` and empty otherwise.

    ``put_back``: files of the patch that the tests do not see.
    """

    kind: VerdictKind | None = None
    reason: str = ""
    put_back: tuple[str, ...] = ()
    output: str = ""


async def apply_patch(box: Box, instance: Instance, patch: str) -> Applied:
    """Apply a patch. Raises ``InfrastructureError`` where nothing could be run."""
    # A test patch that only adds files makes the official scripts check out the base commit as a whole, which would
    # undo what set-up changed, were that a commit.
    loose = "" if restored_files(instance.test_patch) else f"git reset --quiet --soft {instance.base_commit}\n"
    word = secrets.token_hex(8)
    # Times of change are as coarse as the kernel's clock.
    script = (
        f"cat >{PATCH_INSIDE}\n{loose}: > /tmp/{word}; echo {word}; sleep 0.02\n{{ {_APPLY}; }} || exit 1\n"
        f"echo; echo {word}; find . -cnewer /tmp/{word} ! -type d -printf '%P\\0'; rm -f /tmp/{word}\n"
    )
    ended = await box.run(["/bin/bash", "-c", script], timeout=_APPLY_TIME, given=patch.encode())
    before, began, text = ended.text.partition(f"{word}\n")
    if not began:
        raise InfrastructureError(f"the patch could not be tried: {before.strip()[:300] or f'status {ended.code}'}")
    printed, _, listed = text.partition(f"\n{word}\n")
    if ended.timed_out:
        return Applied(VerdictKind.UNAPPLIED, "applying the patch took too long", output=printed)
    if ended.code:
        return Applied(VerdictKind.UNAPPLIED, ended.last_line, output=printed)
    found = [name for name in listed.split("\0") if name]
    if why := _unnamed(found, touched_files(patch)):
        return Applied(VerdictKind.REFUSED, why, output=printed)
    back = _put_back(instance, patch, {*found, *touched_files(patch)})
    own = {*added_files(instance.test_patch)} & {*found, *changed_files(patch)}
    new = sorted(own | (back & {*added_files(patch), *(name for name in found if _is_compiled(name))}))
    old = sorted(back - own)
    if new or old:
        lines = [f"rm -rf -- {shlex.quote(name)}" for name in new]
        lines += [f"git checkout --quiet -- {shlex.quote(name)} 2>/dev/null || true" for name in old]
        await box.run(["/bin/bash", "-c", "\n".join(lines)], timeout=_APPLY_TIME)
        printed += f"\nput back: {' '.join([*new, *old])}"
    return Applied(put_back=(*new, *old), output=printed)


def _unnamed(found: Iterable[str], named: frozenset[str]) -> str:
    """Why the changes are refused: files that no section of the patch names. Empty when all are named."""
    # Sections may have other prefixes than ``a/`` and ``b/``.
    allowed = named | {name.partition("/")[2] for name in named}
    allowed |= {name + left for name in allowed for left in _LEFT}
    wrong = sorted(name for name in found if name not in allowed or is_gits_own(name))
    return f"applying it changes what it does not name: {', '.join(wrong[:_MOST])}" if wrong else ""


def runs_tests(instance: Instance, patch: str, file: str) -> bool:
    """Whether a file decides how tests are run: ``conftest.py``, settings, what Python runs or imports before them."""
    path, added = PurePosixPath(file), [line for each in read_patch(patch) if each.new == file for line in each.added]
    top = path.parts[0].removesuffix(".py")
    shadows = top in _IMPORTED and top != instance.repo.rpartition("/")[2]
    return (
        path.name in _RUNNERS
        or path.suffix == ".pth"
        or (shadows and (path.name == file or path.parts[1:] == ("__init__.py",)) and path.suffix == ".py")
        or (path.name in _SETTINGS and any(map(_OPTIONS.search, added)))
        or file in str(instance.extra.get("test_command", "")).split()
    )


def _put_back(instance: Instance, patch: str, changed: Iterable[str]) -> frozenset[str]:
    graded = touched_files(instance.test_patch) | instance.test_files
    needed, folders = touched_files(instance.patch), {folder for file in graded if (folder := _tests_folder(file))}
    return frozenset(
        file
        for file in changed
        if file in instance.test_files
        or _is_compiled(file)
        or (
            file not in needed | graded
            and (runs_tests(instance, patch, file) or any(PurePosixPath(file).is_relative_to(each) for each in folders))
        )
    )


def _is_compiled(file: str) -> bool:
    return file.endswith((".pyc", ".pyo")) or "__pycache__" in file.split("/")


def _tests_folder(file: str) -> str:
    """The outermost folder named ``test`` or ``tests`` above a file, else the innermost ``testing``; empty: none."""
    parts = PurePosixPath(file).parts[:-1]
    at = [at for at, part in enumerate(parts) if part in ("test", "tests")][:1]
    at = at or [at for at, part in enumerate(parts) if part == "testing"][-1:]
    return "/".join(parts[: at[0] + 1]) if at else ""
