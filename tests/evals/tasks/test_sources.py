"""What tasks can be made from, and the clear lines for what they cannot."""

from __future__ import annotations

import io
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from needs import needs_bubblewrap

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.evals.swe.dataset import instance_of
from openhands_rl_plugin.evals.tasks.packages import (
    Package,
    TaskRepositories,
    fetch,
    layout_of,
    make_environment,
    parse_source,
)
from openhands_rl_plugin.evals.tasks.trees import (
    LINK,
    PLAIN,
    GitRepository,
    SourceTree,
    TreeFile,
    make_repository,
    read_archive,
)


def archive(path: Path, **files: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as out:
        for name, text in files.items():
            member = tarfile.TarInfo(name.replace("__", "/").replace("_py", ".py"))
            member.size = len(text.encode())
            out.addfile(member, io.BytesIO(text.encode()))
    return path


def test_sources_of_the_command_line(tmp_path: Path) -> None:
    assert parse_source("inflection==0.5.1") == Package(name="inflection", version="0.5.1")
    subprocess.run(["git", "init", "--quiet", str(tmp_path / "work")], check=True)
    found = parse_source(f"{tmp_path / 'work'}@v1")
    assert (found.name, found.git, found.commit) == ("work", str(tmp_path / "work"), "v1")
    assert parse_source("https://host/owner/name.git@abc").commit == "abc"
    with pytest.raises(ConfigError, match="is no source"):
        parse_source("inflection")


GOOD = ("a.py", "a/.gitignore", ".github/x", "a b/\u00fc.py", "..a/b..", "git/x", "a.git/b")
BAD = (
    "",
    "/a",
    "a//b",
    "a/../b",
    "a\\..\\b",
    "a\0b",
    ".git",
    "a/.GIT/hooks/x",
    "git~1/x",
    ".g\u200cit/x",
    "\uff0egit/x",
)


def test_names_of_others_stay_below_their_folder(tmp_path: Path) -> None:
    """Of archives they are left out; of rows and repositories they are refused."""
    SourceTree.changed(SourceTree({}), dict.fromkeys(GOOD, "x")).write(tmp_path / "good")
    path = tmp_path / "a-1.tar.gz"
    with tarfile.open(path, "w:gz") as out:
        for name in ("ok.py", *(each for each in BAD if "\0" not in each)):
            member = tarfile.TarInfo(f"a-1/{name}")
            member.size, member.mode = 2, 0o755
            out.addfile(member, io.BytesIO(b"x\n"))
        link = tarfile.TarInfo("a-1/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        out.addfile(link)
    assert set(read_archive(path).files) == {"ok.py"}
    bomb = tarfile.TarInfo("a name of 1 GiB")
    bomb.type, bomb.size = tarfile.GNUTYPE_LONGNAME, 2**30
    path.write_bytes(bomb.tobuf(tarfile.GNU_FORMAT))
    with pytest.raises(ConfigError, match="more than 20000 files or 256 MB"):
        read_archive(path)
    behind = {"link": TreeFile(LINK, str(tmp_path).encode()), "link/out": TreeFile(PLAIN, b"x")}
    for files in ({name: TreeFile(PLAIN, b"x") for name in [each]} for each in BAD):
        with pytest.raises(ConfigError, match="leaves the folder"):
            make_repository(SourceTree(files), tmp_path / "bad" / "bad")
    with pytest.raises(ConfigError, match="leaves the folder"):
        SourceTree(behind).write(tmp_path / "bad")
    work = tmp_path / "work"
    words = ["git", "-C", str(work)]
    subprocess.run(["git", "init", "--quiet", str(work)], check=True)
    tree = ""
    for name in ("evil.py", "..", "a"):
        kind = "040000 tree" if tree else "100644 blob"
        found = tree or subprocess.check_output([*words, "hash-object", "-w", "--stdin"], input="x", text=True).strip()
        tree = subprocess.check_output([*words, "mktree"], input=f"{kind} {found}\t{name}\n", text=True).strip()
    with pytest.raises(ConfigError, match="leaves the folder"):
        GitRepository(work).tree(tree)
    assert {each.name for each in tmp_path.iterdir()} == {"good", path.name, "work"}


ROW = {"instance_id": "a", "repo": "o/n", "base_commit": "0" * 40, "problem_statement": "x", "FAIL_TO_PASS": ["t"]}


@pytest.mark.parametrize(
    "columns",
    [
        *({"instance_id": each} for each in ("../a", ".git", "a\0")),
        *({"repo": each} for each in ("/srv/private", "o/../../n")),
        {"base_commit": "--output=/tmp/x"},
    ],
    ids=str,
)
def test_a_row_names_no_place_of_this_machine(columns: dict[str, str]) -> None:
    assert instance_of(ROW).repo == "o/n"
    with pytest.raises(ConfigError, match="cannot"):
        instance_of({**ROW, **columns})


@pytest.mark.parametrize("version", ["../../../srv", "1.0 --index-url=x"])
async def test_a_rows_source_names_no_place_either(version: str, tmp_path: Path) -> None:
    row = instance_of({**ROW, "source": {"sdist": "a", "version": version, "sha256": "0" * 64}})
    with pytest.raises(ConfigError, match="a source that is none"):
        await TaskRepositories(tmp_path).find(row)


BACKEND = """import os, pathlib
try:
    pathlib.Path("{marker}").touch()
except OSError:
    pass
seen = [each for each in (*os.environ, os.path.expanduser("~/.netrc")) if "API_KEY" in each or os.path.exists(each)]
raise SystemExit("ERROR the build saw %s" % (seen or "nothing"))
"""
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


@needs_bubblewrap
def test_code_of_packages_runs_in_a_sandbox_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker, links, home = tmp_path / "ran", tmp_path / "links", tmp_path / "home"
    home.mkdir()
    (home / ".netrc").write_text("machine index login me password secret\n")
    files = {"backend_py": BACKEND.format(marker=marker), "pyproject.toml": PROJECT, "PKG-INFO": "Name: evil\n"}
    archive(links / "evil-1.0.tar.gz", **{f"evil-1.0__{name}": text for name, text in files.items()})
    with zipfile.ZipFile(links / "late-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("late.pth", f"import pathlib; pathlib.Path({str(marker)!r}).touch()\n")
        wheel.writestr("late-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: late\nVersion: 1.0\n")
        wheel.writestr("late-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("late-1.0.dist-info/RECORD", "")
    settings = {"PIP_FIND_LINKS": str(links), "PIP_NO_INDEX": "1", "UV_FIND_LINKS": str(links), "UV_NO_INDEX": "1"}
    for name, value in {**settings, "OPENAI_API_KEY": "sk-secret", "HOME": str(home)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InfrastructureError, match="the build saw nothing"):
        fetch(Package(name="evil", version="1.0"), tmp_path / "cache")
    monkeypatch.chdir(links)
    for none in ("evil==1.0", "late-1.0-py3-none-any.whl"):  # no file of the working folder either
        with pytest.raises(InfrastructureError, match="no wheels that fit"):
            make_environment("3.12", (none,), tmp_path / "cache")
    for wrong in (f"evil @ file://{links}/evil-1.0.tar.gz", "-r /etc/passwd", "--index-url=x", "./evil", "a\nb"):
        with pytest.raises(ConfigError, match="is no name with versions"):
            make_environment("3.12", (wrong,), tmp_path / "cache")
        tree = SourceTree({}).changed({"PKG-INFO": f"Name: x\nRequires-Dist: {wrong}\nRequires-Dist: late>=1\n"})
        assert wrong not in layout_of(tree).requirements
    made = make_environment("3.12", ("late==1.0",), tmp_path / "cache")
    assert [*made.rglob("late.pth")] and not marker.exists()


def test_an_archive_with_another_hash_is_refused(tmp_path: Path) -> None:
    archive(tmp_path / "sdists" / "a-1.0" / "a-1.0.tar.gz", top__a_py="x = 1\n")
    with pytest.raises(ConfigError, match="another sha256"):
        fetch(Package(name="a", version="1.0", sha256="0" * 64), tmp_path)


def test_code_tests_and_requirements_are_kept_apart() -> None:
    paths = (
        *("src/shop/__init__.py", "src/shop/basket.py", "src/shop/tests/test_in.py", "src/shop/_vendor/x.py"),
        *("tests/test_a.py", "tests/helpers.py", "docs/conf.py", "setup.py", "noxfile.py", "examples/demo.py"),
    )
    files = {path: TreeFile(PLAIN, b"") for path in paths}
    metadata = "Name: shop\nRequires-Dist: attrs>=20\nRequires-Dist: tox; extra == 'dev'\n\nText\n"
    found = layout_of(SourceTree({**files, "PKG-INFO": TreeFile(PLAIN, metadata.encode())}))
    assert found.code == ("src/shop/__init__.py", "src/shop/basket.py")
    assert found.arguments == ("src/shop/tests", "tests")
    assert (found.paths, found.requirements) == (("src",), ("attrs>=20",))
