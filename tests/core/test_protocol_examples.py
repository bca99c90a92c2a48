"""The examples in the docstrings of the seams do what they show."""

from __future__ import annotations

import ast
import doctest
from pathlib import Path

from openhands_rl_plugin.core import protocols


def test_the_examples_run() -> None:
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    (shared,) = (each for each in finder.find(protocols) if each.name == protocols.__name__)
    runner.run(shared, clear_globs=False)
    for example in finder.find(protocols, globs=shared.globs):
        runner.run(example)
    assert runner.failures == 0 and runner.tries > 20


def test_every_seam_has_an_example() -> None:
    tree = ast.parse(Path(protocols.__file__).read_text(encoding="utf-8"))
    seams = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert [seam.name for seam in seams if ">>>" not in (ast.get_docstring(seam) or "")] == []
