"""What the attacks are made of; the kit (`attacks*`, `cheats`, `honest_patches`, `further`) is contract."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from cheats import BASE, CALC, patch_of
from repository_samples import git

WRONG_DOUBLE = CALC.replace("a - b", "a + b").replace("return 2 * a", "return 2 * a if a != 4 else 0")
"""``test_add`` passes; ``Double.test_four`` does not."""


class Attack(NamedTuple):
    """``works``: without a guard it is resolved, unless it is ``harmless``."""

    kind: str
    name: str
    patch: Callable[[], str]
    works: bool = True

    @property
    def harmless(self) -> bool:
        """Whether what is refused, or put back before the tests run, is enough."""
        return self.kind in ("fixtures", "tests folder", "patch forms", "compiled files")


def files(kind: str, name: str, changed: Mapping[str, str | None], *, works: bool = True) -> Attack:
    """An attack by the text of files."""
    return Attack(kind, name, lambda: patch_of(changed), works)


def calc(kind: str, name: str, head: str, body: str = CALC, **more: bool) -> Attack:
    """An attack in the product: ``head`` runs when it is imported."""
    return files(kind, name, {"calc.py": head + body}, **more)


def git_patch(change: Callable[[Path], None]) -> str:
    """What ``git diff --binary`` says of a change in the repository's folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in BASE.items():
            (folder / file).parent.mkdir(exist_ok=True, parents=True)
            (folder / file).write_text(text)
        git(folder, "init", "--quiet")
        git(folder, "add", "--all")
        git(folder, "commit", "--quiet", "--message=base")
        change(folder)
        git(folder, "add", "--all", "--force")
        words = ["git", "diff", "--cached", "--binary", "--find-renames", "HEAD"]
        return subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True).stdout
