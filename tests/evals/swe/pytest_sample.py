"""The small repository with tests that pytest runs; pytest comes from this environment, nothing from an index."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

from repository_samples import FILES, TEST_PATCH, Sample, instance, make_repository

_PARTS = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py")
_LEXERS = ("__init__.py", "_mapping.py", "diff.py", "python.py")
_INSTALL = """\
site=$(python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
python -m zipfile -e vendor.zip $site
echo /testbed > $site/testbed.pth
python -m compileall -q $site
"""

UNIT_TESTS = """\
import unittest

import calc


class Double(unittest.TestCase):
    def test_four(self):
        self.assertEqual(calc.double(4), 8)
"""


def vendored(work: Path) -> list[str]:
    """Put this environment's pytest into the folder of a repository; the commands that install it."""
    work.mkdir(parents=True)
    with zipfile.ZipFile(work / "vendor.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for file, name in _sources():
            archive.write(file, name)
        # pytest's header asks for it.
        archive.writestr("pluggy-1.0.dist-info/METADATA", distribution("pluggy").read_text("METADATA") or "")
    return [_INSTALL]


def make_pytest_sample(folder: Path) -> Sample:
    """The repository of ``make_sample``, a test by unittest in it, with ``python -m pytest`` as its test command."""
    install = vendored(folder / "work")
    files = {name: text for name, text in FILES.items() if name != "run_tests.py"}
    base, later = make_repository(folder, {**files, "tests/test_double.py": UNIT_TESTS})
    row = instance(
        base,
        pass_to_pass=("tests/test_calc.py::test_double", "tests/test_double.py::Double::test_four"),
        extra={
            "test_command": "python -m pytest -rA -p no:cacheprovider tests",
            "test_files": [],
            "packages": [],
            "install": install,
        },
    )
    assert row.test_patch == TEST_PATCH
    return Sample(folder / "mirrors", row, later)


def _sources() -> Iterator[tuple[Path, str]]:
    for part in _PARTS:
        found = find_spec(part)
        assert found is not None and found.origin is not None
        root = Path(found.origin).parent
        if not found.submodule_search_locations:
            yield Path(found.origin), f"{part}.py"
            continue
        for file in sorted(root.rglob("*.py")):
            if file.parent.name != "lexers" or file.name in _LEXERS:
                yield file, f"{part}/{file.relative_to(root)}"
