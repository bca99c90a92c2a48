"""The layout of a package: code, tests, requirements."""

from __future__ import annotations

import re
import tomllib
from email.parser import Parser
from pathlib import PurePosixPath

from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.tasks.sources.trees import SourceTree

_TEST_FOLDERS = {"tests", "test", "testing"}
_OTHER_FOLDERS = {
    *("doc", "docs", "example", "examples", "benchmark", "benchmarks", "bench", "script", "scripts", "tools", "build"),
    *("dist", "vendor", "_vendor", "vendored", "extern", "fuzz", "fuzzing", "perf", "ci", "requirements", "tasks"),
}
_OTHER_FILES = {"setup.py", "noxfile.py", "conf.py", "fabfile.py", "versioneer.py", "__main__.py", "_version.py"}
_TEST_FILE = re.compile(r"test_.+\.py|.+_tests?\.py|tests?\.py")


class PackageLayout(Frozen):
    """Paths from the root: files of code, files of tests, folders that are imported from, and pytest's arguments.

    ``requirements`` are those that the package declares for itself.
    """

    code: tuple[str, ...]
    tests: tuple[str, ...]
    paths: tuple[str, ...]
    arguments: tuple[str, ...]
    requirements: tuple[str, ...]


def layout_of(tree: SourceTree) -> PackageLayout:
    """The layout of a package's files."""
    python = [PurePosixPath(path) for path in tree.files if path.endswith(".py")]
    paths = tuple(root for root in ("src", "lib") if any(_is_package(tree, path, root) for path in python))
    code = [path for path in python if is_code(str(path)) and _root_of(path, paths) and _in_package(tree, path, paths)]
    tests = [path for path in python if is_test(str(path)) and _TEST_FILE.fullmatch(path.name)]
    return PackageLayout(
        code=tuple(map(str, code)),
        tests=tuple(map(str, tests)),
        paths=paths,
        arguments=_arguments(tests),
        requirements=_requirements(tree),
    )


def is_test(path: str) -> bool:
    """Whether a file belongs to the tests."""
    parts = PurePosixPath(path).parts
    name = parts[-1]
    return bool(_TEST_FOLDERS & set(parts[:-1])) or bool(_TEST_FILE.fullmatch(name)) or name == "conftest.py"


def _is_package(tree: SourceTree, path: PurePosixPath, root: str) -> bool:
    parts = path.parts
    return parts[0] == root and (len(parts) == 2 or f"{root}/{parts[1]}/__init__.py" in tree.files)


def is_code(path: str) -> bool:
    """Whether a file is code of the package: no tests, documentation or tools."""
    parts = PurePosixPath(path).parts
    folders = set(parts[:-1])
    hidden = any(part.startswith(".") for part in parts)
    return not (hidden or is_test(path) or folders & _OTHER_FOLDERS or parts[-1] in _OTHER_FILES)


def _root_of(path: PurePosixPath, paths: tuple[str, ...]) -> bool:
    return path.parts[0] in paths if paths else True


def _in_package(tree: SourceTree, path: PurePosixPath, paths: tuple[str, ...]) -> bool:
    """A module at a root, or a file of a package there."""
    inside = path.parts[1:] if paths else path.parts
    root = f"{path.parts[0]}/" if paths else ""
    return len(inside) == 1 or f"{root}{inside[0]}/__init__.py" in tree.files


def _arguments(tests: list[PurePosixPath]) -> tuple[str, ...]:
    """The outermost folders of tests; files that pytest would not find by their names, and those apart, by name."""
    folders: set[str] = set()
    alone: set[str] = set()
    for path in tests:
        parts = path.parts
        at = next((index for index, part in enumerate(parts[:-1]) if part in _TEST_FOLDERS), None)
        if at is not None and re.fullmatch(r"test_.+\.py|.+_test\.py", path.name):
            folders.add("/".join(parts[: at + 1]))
        else:
            alone.add(str(path))
    if folders:
        alone = {path for path in alone if any(path.startswith(f"{folder}/") for folder in folders)}
    return tuple(sorted(folders | alone))


def _requirements(tree: SourceTree) -> tuple[str, ...]:
    if (text := tree.text("PKG-INFO")) is not None:
        found = Parser().parsestr(text, headersonly=True).get_all("Requires-Dist") or []
        return tuple(sorted(each for each in found if "extra ==" not in each.replace("'", '"')))
    if (text := tree.text("pyproject.toml")) is not None:
        try:
            declared = tomllib.loads(text).get("project", {}).get("dependencies", [])
        except (tomllib.TOMLDecodeError, AttributeError):
            return ()
        return tuple(sorted(each for each in declared if isinstance(each, str)))
    return ()
