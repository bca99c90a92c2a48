"""Applies a patch in a box, compares what changed with what the patch names, and puts the row's tests back.

What graded tests are made of is the row's: files in their folders, every ``conftest.py`` and compiled files are as the
row and its set-up have them, whatever a patch does to them, unless the row's own fix changes them too.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.environments.workspace.processes import Ended
from openhands_rl_plugin.evals.swe.patches import added_files, changed_files, restored_files, touched_files
from openhands_rl_plugin.evals.swe.types import Instance, VerdictKind

PATCH_INSIDE = "/tmp/patch.diff"

_APPLY = " || ".join(
    f"{command} {PATCH_INSIDE}"
    for command in ("git apply --verbose", "git apply --verbose --reject", "patch --batch --fuzz=5 -p1 -i")
)
"""The official commands, tried in this order."""
_APPLY_TIME = 120.0
_LEFT = (".orig", ".rej")
_MOST = 3

RunCommand = Callable[[Sequence[str], float], Awaitable[Ended]]
"""Runs a command in the repository, for at most so many seconds."""


class Applied(NamedTuple):
    """``kind`` and ``reason`` of a patch that could not be applied; ``None`` and empty otherwise.

    ``put_back``: files of the patch that the tests do not see.
    """

    kind: VerdictKind | None = None
    reason: str = ""
    put_back: tuple[str, ...] = ()
    output: str = ""


async def apply_patch(run: RunCommand, instance: Instance, patch: str) -> Applied:
    """Apply the patch that lies at ``PATCH_INSIDE``. Raises ``InfrastructureError`` where nothing could be run."""
    # A test patch that only adds files makes the official scripts check out the base commit as a whole, which would
    # undo what set-up changed, were that a commit.
    loose = "" if restored_files(instance.test_patch) else f"git reset --quiet --soft {instance.base_commit}\n"
    word = secrets.token_hex(8)
    # Times of change are as coarse as the kernel's clock.
    script = (
        f"{loose}: > /tmp/{word}; echo {word}; sleep 0.02\n{{ {_APPLY}; }} || exit 1\n"
        f"echo; echo {word}; find . -cnewer /tmp/{word} ! -type d -printf '%P\\0'; rm -f /tmp/{word}\n"
    )
    ended = await run(["/bin/bash", "-c", script], _APPLY_TIME)
    before, began, text = ended.text.partition(f"{word}\n")
    if not began:
        raise InfrastructureError(f"the patch could not be tried: {before.strip()[:300] or f'status {ended.code}'}")
    said, _, listed = text.partition(f"\n{word}\n")
    if ended.timed_out:
        return Applied(VerdictKind.UNAPPLIED, "applying the patch took too long", output=said)
    if ended.code:
        return Applied(VerdictKind.UNAPPLIED, ended.last_line, output=said)
    found = [name for name in listed.split("\0") if name]
    if why := _unnamed(found, touched_files(patch)):
        return Applied(VerdictKind.REFUSED, why, output=said)
    back = _put_back(instance, {*found, *touched_files(patch)})
    own = {*added_files(instance.test_patch)} & {*found, *changed_files(patch)}
    new = sorted(own | (back & {*added_files(patch), *(name for name in found if _is_compiled(name))}))
    old = sorted(back - own)
    if new or old:
        lines = [f"rm -rf -- {shlex.quote(name)}" for name in new]
        lines += [f"git checkout --quiet -- {shlex.quote(name)} 2>/dev/null || true" for name in old]
        await run(["/bin/bash", "-c", "\n".join(lines)], _APPLY_TIME)
        said += f"\nput back: {' '.join([*new, *old])}"
    return Applied(put_back=(*new, *old), output=said)


def _unnamed(found: Iterable[str], named: frozenset[str]) -> str:
    """Why the changes are refused: files that no section of the patch names. Empty when all are named."""
    # Sections may have other prefixes than ``a/`` and ``b/``.
    allowed = named | {name.partition("/")[2] for name in named}
    allowed |= {name + left for name in allowed for left in _LEFT}
    wrong = sorted(name for name in found if name not in allowed or name.split("/")[0] == ".git")
    more = f" and {len(wrong) - _MOST} more" if len(wrong) > _MOST else ""
    return f"applying it changes what it does not name: {', '.join(wrong[:_MOST])}{more}" if wrong else ""


def _put_back(instance: Instance, changed: Iterable[str]) -> frozenset[str]:
    graded = touched_files(instance.test_patch) | instance.test_files
    needed, folders = touched_files(instance.patch), {folder for file in graded if (folder := _tests_folder(file))}
    return frozenset(
        file
        for file in changed
        if file in instance.test_files
        or _is_compiled(file)
        or (
            file not in needed | graded
            and (PurePosixPath(file).name == "conftest.py" or any(_below(file, folder) for folder in folders))
        )
    )


def _is_compiled(file: str) -> bool:
    return file.endswith((".pyc", ".pyo")) or "__pycache__" in file.split("/")


def _below(file: str, folder: str) -> bool:
    return file == folder or file.startswith(folder + "/")


def _tests_folder(file: str) -> str:
    """The outermost folder named ``test`` or ``tests`` above a file, else the innermost ``testing``; empty: none."""
    parts = PurePosixPath(file).parts[:-1]
    at = next((at for at, part in enumerate(parts) if part in ("test", "tests")), None)
    if at is None:
        at = max((at for at, part in enumerate(parts) if part == "testing"), default=None)
    return "" if at is None else "/".join(parts[: at + 1])
