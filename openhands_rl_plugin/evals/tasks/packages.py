"""Packages for tasks: releases and git repositories, fetched, laid out, with their Python environments."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from email.parser import Parser
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pydantic import Field, ValidationError

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.core.files import draft_folder, file_sha256, read_left, scratch_folder, write_file
from openhands_rl_plugin.core.redaction import redact_text
from openhands_rl_plugin.core.types import Frozen, JsonObject
from openhands_rl_plugin.environments.workspace.git import clone_command, git_folder, run_git
from openhands_rl_plugin.evals.swe.backends.interpreters import find_python, find_uv
from openhands_rl_plugin.evals.swe.backends.sandbox import InstanceSandbox, Room
from openhands_rl_plugin.evals.swe.types import Instance
from openhands_rl_plugin.evals.tasks.trees import MOST_BYTES, GitRepository, SourceTree, bounded, read_archive

_NAME = r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"
_VERSION = r"[0-9][A-Za-z0-9.!+_-]*"


class Package(Frozen):
    """One package and how its tests run: a release (``version``) on the package index, or a commit of a repository.

    ``sha256`` is that of the release's source archive; empty: whatever the index gives. ``tests`` are pytest's
    arguments, found when left empty.
    """

    name: str = Field(pattern=rf"^{_NAME}$")
    version: str = Field(default="", pattern=rf"^({_VERSION})?$")
    sha256: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    git: str = ""
    commit: str = "HEAD"
    tests: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The package's name and version, for messages."""
        return f"{self.name} {self.version}".rstrip()


class TaskPlan(Frozen):
    """Packages and what is made of them. ``requirements`` go into every environment, ``python`` is its version."""

    packages: tuple[Package, ...] = Field(min_length=1)
    python: str = Field(default="3.12", pattern=r"^3\.1\d$")
    requirements: tuple[str, ...] = ("pytest==8.4.2",)
    per_package: int = Field(default=4, ge=1, le=1000)
    seed: int = 1
    timeout: float = Field(default=60.0, gt=0)
    """Seconds that one run of the tests may take."""
    least_share: float = Field(default=0.01, ge=0, le=0.5)
    """The fraction of the tests that a bug has to make fail, at least; one test in any case."""


def parse_source(text: str, tests: tuple[str, ...] = ()) -> Package:
    """One SOURCE of the command line: ``name==1.2``, or a git repository (``@commit``). Raises ``ConfigError``."""
    if found := re.fullmatch(rf"(?P<name>{_NAME})==(?P<version>{_VERSION})", text):
        return Package(name=found["name"], version=found["version"], tests=tests)
    place, _, commit = text.partition("@") if not re.match(r"[\w.+-]+@|[a-z+]+://[^/]*@", text) else (text, "", "")
    path = Path(place)
    if "://" in place or place.endswith(".git") or (path / ".git").exists() or (path / "HEAD").exists():
        where = place if "://" in place or not path.exists() else str(path.resolve())
        name = package_name(Path(place.rstrip("/")).resolve())
        return Package(name=name, git=where, commit=commit or "HEAD", tests=tests)
    raise ConfigError(f"{text} is no source: give name==version (as {text}==1.0), or a git repository")


def package_name(folder: Path) -> str:
    """The name of the package in the repository of that folder."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", folder.name.removesuffix(".git")).strip("._-")
    return name or "repository"


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

    def imported(path: PurePosixPath, root: str) -> bool:
        """Whether it is a module at an import root, or a file of a package there."""
        parts = path.parts[1:] if root else path.parts
        below = not root or path.parts[0] == root
        return below and (len(parts) == 1 or str(PurePosixPath(root, parts[0], "__init__.py")) in tree.files)

    paths = tuple(root for root in ("src", "lib") if any(imported(path, root) for path in python))
    code = [path for path in python if is_code(str(path)) and any(imported(path, root) for root in paths or ("",))]
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


def is_code(path: str) -> bool:
    """Whether a file is code of the package: no tests, documentation or tools."""
    parts = PurePosixPath(path).parts
    folders = set(parts[:-1])
    hidden = any(part.startswith(".") for part in parts)
    return not (hidden or is_test(path) or folders & _OTHER_FOLDERS or parts[-1] in _OTHER_FILES)


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
    """Those that are names with versions: files, addresses and options are left out."""
    found: list[str] = []
    if (text := tree.text("PKG-INFO")) is not None:
        found = Parser().parsestr(text, headersonly=True).get_all("Requires-Dist") or []
        found = [str(each) for each in found if "extra ==" not in str(each).replace("'", '"')]
    elif (text := tree.text("pyproject.toml")) is not None:
        try:
            declared = tomllib.loads(text).get("project", {}).get("dependencies", [])
        except (tomllib.TOMLDecodeError, AttributeError):
            return ()
        found = [each for each in declared if isinstance(each, str)]
    return tuple(sorted(each for each in found if _PLAIN_REQUIREMENT.fullmatch(each)))


_INSTALLING = 900
_PLAIN_REQUIREMENT = re.compile(rf"{_NAME} *(\[[\w ,.-]*\])?[ \w.*+!<>=~,()-]*(;[^\n]*)?")


def make_environment(python: str, requirements: Sequence[str], cache: Path) -> Path:
    """The folder of the environment; two runs may ask for the same one at a time.

    Raises ``ConfigError`` when there is no such Python, or no ``uv``; ``InfrastructureError`` without network.
    """
    key = hashlib.sha256("\n".join((python, *sorted(requirements))).encode()).hexdigest()[:16]
    final = cache / "task-environments" / f"{python}-{key}"
    if (final / "ready").exists():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    if wrong := [each for each in requirements if not _PLAIN_REQUIREMENT.fullmatch(each)]:
        raise ConfigError(f"the requirement {wrong[0]!r:.100} is no name with versions: nothing else is installed")
    interpreter = str(find_python(python).program)
    # Made in place, because a virtual environment cannot be moved.
    own = Path(tempfile.mkdtemp(dir=final.parent, prefix=f"{final.name}-"))
    uv = str(find_uv())
    _run([uv, "venv", "--quiet", "--clear", "--python", interpreter, str(own)], f"an environment of Python {python}")
    if requirements:
        # No code of a package is executed: wheels are unpacked, and compiled by a Python that does not see them.
        words = [uv, "pip", "install", "--quiet", "--only-binary", ":all:", "--python", str(own / "bin" / "python")]
        _run([*words, *requirements], f"the requirements {', '.join(requirements)}")
        _run([interpreter, "-I", "-S", "-m", "compileall", "-q", str(own / "lib")], "compiling", checked=False)
    (own / "ready").touch()
    try:
        final.symlink_to(own.name)
    except FileExistsError:
        shutil.rmtree(own)
    return final


def _run(command: list[str], what: str, *, checked: bool = True) -> None:
    try:
        # Not in the working folder: its settings of uv, and files with names of requirements, may be somebody else's.
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALLING, input="", cwd="/")
    except subprocess.TimeoutExpired as error:
        raise InfrastructureError(f"{what}: took more than {_INSTALLING} s; try again") from error
    if done.returncode and checked:
        output = redact_text(" ".join(done.stderr.split()))[-300:]
        raise InfrastructureError(f"{what}: no wheels that fit, or the package index is not within reach: {output}")


_FETCHING = 600
_DOWNLOAD = """
"$1" -m venv /tmp/pip
/tmp/pip/bin/python -m pip download --quiet --no-deps --no-binary :all: --dest /tmp/found "$2"
"""


class SourceOrigin(NamedTuple):
    """Where a tree came from. ``pin``: the hash of a release's archive, or the commit; ``source``: as in a row."""

    kind: str
    version: str
    pin: str
    source: JsonObject


def fetch(package: Package, cache: Path) -> tuple[SourceOrigin, SourceTree]:
    """The files of a package. Raises ``ConfigError`` for an unknown one, ``InfrastructureError`` without network."""
    if package.git:
        repository = open_git(package, cache)
        try:
            name = f"{package.commit}^{{commit}}"
            commit = repository.text("rev-parse", "--verify", "--end-of-options", name).strip()
        except ConfigError as error:
            raise ConfigError(f"{package.git} has no commit {package.commit}") from error
        return git_origin(package, commit), bounded(repository.tree(commit), package.label)
    folder = cache / "sdists" / f"{package.name.lower()}-{package.version}"
    archive = next((path for path in sorted(folder.glob("*")) if not path.name.startswith(".")), None)
    if archive is None:
        archive = _download(package.name, package.version, folder)
    pin = file_sha256(archive)
    if package.sha256 and pin != package.sha256:
        raise ConfigError(
            f"{package.label}: {archive} has another sha256 ({pin}) than the pinned {package.sha256};"
            " delete the file, or find out who changed it"
        )
    source: JsonObject = {"sdist": package.name, "version": package.version, "sha256": pin}
    return SourceOrigin("sdist", package.version, pin, source), read_archive(archive)


def git_origin(package: Package, commit: str) -> SourceOrigin:
    """The origin of a commit of a package's repository."""
    return SourceOrigin("git", commit[:8], commit, {"git": package.git, "commit": commit})


def _download(name: str, version: str, folder: Path) -> Path:
    """Fetched by pip, which executes code of the package: in a sandbox, which sees no variable and no login of the
    user's."""
    python = find_python(f"{sys.version_info.major}.{sys.version_info.minor}")
    what = f"{name} {version}"
    with scratch_folder("fetch") as scratch:
        for part in ("layer", "tmp"):
            (scratch / part).mkdir()
        script = ["/bin/bash", "-ec", _DOWNLOAD, "bash", str(python.program), f"{name}=={version}"]
        room = Room(scratch / "layer", scratch / "tmp")
        command = InstanceSandbox(python, "").wrap(room, script, network=True, setup=True, logins=False)
        try:
            done = subprocess.run(command, capture_output=True, timeout=_FETCHING, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired as error:
            raise InfrastructureError(f"fetching {what} took more than {_FETCHING} s; try again") from error
        found = next(os.walk(scratch / "tmp" / "found"), ("", [], []))[2]
        files = [file for file in sorted(found) if re.search(r"\.(tar\.\w+|tgz)$", file)]
        if done.returncode or not files:
            lines = done.stderr.decode("utf-8", "replace").splitlines()
            why = next((line.strip() for line in reversed(lines) if "ERROR" in line), "there is none")
            raise InfrastructureError(f"{what} could not be fetched as a source archive: {why}")
        write_file(folder / files[0], read_left(scratch / "tmp", f"found/{files[0]}", MOST_BYTES), parents=True)
    return folder / files[0]


def open_git(package: Package, cache: Path) -> GitRepository:
    """The repository where it lies, or a copy in the cache of one at an HTTP address. Raises as ``fetch`` does."""
    where = package.git.removeprefix("file://")
    if not re.match(r"https?://", where):
        if not Path(where).exists():
            raise ConfigError(f"{where}: give a folder, or an HTTPS address; a repository elsewhere is cloned by you")
        return GitRepository(Path(where))
    copy = cache / "git" / hashlib.sha256(where.encode()).hexdigest()[:16]
    if not (copy / "HEAD").exists():
        with draft_folder(copy.parent, f".{copy.name}-") as fresh:
            try:
                run_git(clone_command(where, fresh, "--bare"))
            except subprocess.SubprocessError as error:
                output = getattr(error, "stderr", None) or str(error).encode()
                last = redact_text(output.decode("utf-8", "replace")).strip().splitlines()[-1]
                raise InfrastructureError(f"{where} could not be cloned: {last}") from error
            fresh.rename(copy)
    return GitRepository(copy)


class OwnRepository(Frozen):
    """``root``: the top folder of the work tree. ``uncommitted``: files with changes that no commit has."""

    root: Path
    name: str
    commit: str
    uncommitted: int = 0

    def times(self, commits: Iterable[str]) -> dict[str, int]:
        """Commit -> when it was committed, in Unix seconds."""
        git = GitRepository(self.root)
        return {each: int(git.text("show", "-s", "--format=%ct", each)) for each in commits}


def find_repository(path: Path, commit: str = "HEAD") -> OwnRepository:
    """The repository that ``path`` is in. Raises ``ConfigError`` where there is none, or it has no such commit."""
    if not path.is_dir():
        raise ConfigError(f"--repo {path}: there is no such folder")
    here = path.resolve()
    roots = (each for each in (here, *here.parents) if (each / ".git").exists() or (each / "objects").is_dir())
    if (root := next(roots, None)) is None:
        raise ConfigError(
            f"--repo {path} is no git repository: tasks are made of commits; run `git init`, `git add` and "
            "`git commit` in it, or give another folder"
        )
    git = GitRepository(root)
    bare = git_folder(root) == root
    try:
        found = git.text("rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}").strip()
    except ConfigError as error:
        missing = "no commit yet (`git add`, `git commit`)" if commit == "HEAD" else f"no commit {commit}"
        raise ConfigError(f"--repo {path} has {missing}: tasks are made of commits") from error
    status = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty")
    changed = 0 if bare else len(git.text(*status, work=root).splitlines())
    return OwnRepository(root=root, name=package_name(root), commit=found, uncommitted=changed)


def repository_lines(repository: OwnRepository, newest: str) -> list[str]:
    """Which commit the tasks are of; ``newest``: the commit that is checked out by now."""
    lines = [f"{repository.name}: commit {repository.commit[:12]} of {repository.root}"]
    if newest != repository.commit:
        lines.append(f"  the repository is at {newest[:12]} by now: --fresh makes tasks of that")
    if repository.uncommitted:
        lines.append(f"  {repository.uncommitted} files with uncommitted changes: tasks are made of what is committed")
    return lines


_PLAIN = re.compile(r"[A-Za-z0-9._-]+")


class TaskRepositories:
    """A ``RepositorySource`` for rows with a ``source`` that was pinned by ``tasks make``.

    The row's patches are reverted in the package's files, which gives ``base_commit``.
    """

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._making = asyncio.Lock()

    async def find(self, instance: Instance) -> Path | None:
        """The repository; ``None`` for a row without such a source.

        Raises ``InfrastructureError`` without network, and ``ConfigError`` when the row was changed by hand.
        """
        source = instance.extra.get("source")
        if not isinstance(source, dict):
            return None
        if not _PLAIN.fullmatch(instance.instance_id):
            raise ConfigError(f"the id {instance.instance_id!r} cannot name a folder")
        place = self._cache / "task-repositories" / f"{instance.instance_id}-{instance.base_commit[:12]}.git"
        async with self._making:
            return await asyncio.to_thread(self._made, instance, source, place)

    def _made(self, instance: Instance, source: JsonObject, place: Path) -> Path:
        repository = GitRepository.create(place)
        try:
            repository.git("cat-file", "-e", f"{instance.base_commit}^{{commit}}")
            return place
        except ConfigError:
            pass
        package = _package(source)
        label = str(source.get("label") or package.label)
        _, tree = fetch(package, self._cache)
        solved = repository.commit(tree, label, "solved")
        taken_back = (instance.patch, instance.test_patch)
        base = repository.without(solved, taken_back, label, "main")
        repository.git("update-ref", "-d", "refs/heads/solved")
        if base != instance.base_commit:
            raise InfrastructureError(
                f"{instance.instance_id}: its source and patches give commit {base[:12]}, not"
                f" {instance.base_commit[:12]}; the row, or the source, has been changed"
            )
        return place


def _package(source: JsonObject) -> Package:
    """The package behind a row's source. Raises ``ConfigError`` for a source of another kind, and an invalid one."""
    texts = {name: str(value) for name, value in source.items()}
    try:
        if {"sdist", "version", "sha256"} <= texts.keys():
            return Package(name=texts["sdist"], version=texts["version"], sha256=texts["sha256"])
        if {"git", "commit"} <= texts.keys():
            return Package(name="repository", git=texts["git"], commit=texts["commit"])
    except ValidationError as error:
        raise ConfigError(f"a source that is none: {error.errors()[0]['msg']}") from error
    raise ConfigError(f"a source of an unknown kind: {', '.join(sorted(texts))}")
