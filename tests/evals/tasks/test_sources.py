"""What tasks can be made from, and the clear lines for what they cannot."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from openhands_rl_plugin import cli
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.evals.tasks.packages import (
    Package,
    Release,
    fetch_release,
    layout_of,
    parse_source,
    read_plan,
)
from openhands_rl_plugin.evals.tasks.trees import PLAIN, SourceTree, TreeFile, read_archive


def archive(path: Path, **files: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as out:
        for name, text in files.items():
            member = tarfile.TarInfo(name.replace("__", "/").replace("_py", ".py"))
            member.size = len(text.encode())
            out.addfile(member, io.BytesIO(text.encode()))
    return path


def test_sources_of_the_command_line(tmp_path: Path) -> None:
    assert parse_source("inflection==0.5.1") == Package(name="inflection", release=Release(version="0.5.1"))
    assert parse_source("a-b.c==1.0..2.0rc1").previous == Release(version="1.0")
    file = archive(tmp_path / "thing-1.0.tar.gz", top__a_py="x = 1\n")
    assert parse_source(str(file)) == Package(name="thing-1.0", archive=file)
    subprocess.run(["git", "init", "--quiet", str(tmp_path / "work")], check=True)
    found = parse_source(f"{tmp_path / 'work'}@v1")
    assert (found.name, found.git, found.commit) == ("work", str(tmp_path / "work"), "v1")
    assert parse_source("https://host/owner/name.git@abc").commit == "abc"


@pytest.mark.parametrize(("text", "said"), [("inflection", "say which version"), ("./none.tar.gz", "is no source")])
def test_what_is_no_source(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_source(text)


def test_a_plan_is_refused_with_a_line_for_each_mistake(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(
        'sed = 1\n[[packages]]\nname = "a"\n[[packages]]\nname = "b"\nrelease = {version = "1", sha256 = "x"}\n'
    )
    with pytest.raises(ConfigError) as caught:
        read_plan(plan)
    assert all(line.startswith(f"{plan}: ") for line in str(caught.value).splitlines())
    assert "unknown key; did you mean 'seed'?" in str(caught.value)
    assert "give one of release, archive and git" in str(caught.value)


def test_an_archive_is_read_without_what_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "a-1.tar.gz"
    with tarfile.open(path, "w:gz") as out:
        for name in ("a-1/ok.py", "a-1/../evil.py", "/a-1/abs.py", "a-1/.git/config"):
            member = tarfile.TarInfo(name)
            member.size, member.mode = 2, 0o755
            out.addfile(member, io.BytesIO(b"x\n"))
        link = tarfile.TarInfo("a-1/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        out.addfile(link)
    assert set(read_archive(path).files) == {"ok.py"}


def test_an_archive_with_another_hash_is_refused(tmp_path: Path) -> None:
    archive(tmp_path / "sdists" / "a-1.0" / "a-1.0.tar.gz", top__a_py="x = 1\n")
    with pytest.raises(ConfigError, match="another sha256"):
        fetch_release("a", Release(version="1.0", sha256="0" * 64), tmp_path)


def test_code_tests_and_requirements_are_told_apart() -> None:
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


def test_the_journal_of_other_settings_is_not_taken_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".x.jsonl.journal").write_text("of another plan\n")
    assert cli.main(["tasks", "make", "inflection==0.5.1", "--out", str(tmp_path / "x.jsonl")]) == 1
    assert "journal of a run with other settings" in capsys.readouterr().err
