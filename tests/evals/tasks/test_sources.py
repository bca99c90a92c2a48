"""What tasks can be made from, and the clear lines for what they cannot."""

from __future__ import annotations

import functools
import hashlib
import io
import tarfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from broken_repository import commit_of
from needs import needs_bubblewrap

from openhands_rl_plugin.contrib.repair.rows import RepairSpec
from openhands_rl_plugin.contrib.repair.suites import write_repository
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.evals.swe.instances import instance_of
from openhands_rl_plugin.evals.tasks.source import extract, is_test, requirements_of, task_repository


def archive(path: Path, **files: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as out:
        for name, text in files.items():
            member = tarfile.TarInfo(name.replace("__", "/").replace("_py", ".py"))
            member.size = len(text.encode())
            out.addfile(member, io.BytesIO(text.encode()))
    return path


BAD = ("/a", "a/../../b", ".git", "a/.GIT/hooks/x", "git~1/x", ".g\u200cit/x", "\uff0egit/x", "", "a\0b", "a\\..\\b")


def test_names_of_others_stay_below_their_folder(tmp_path: Path) -> None:
    spec = RepairSpec(
        package="a", license="", kind="", path="a.py", function="f", line=1, files={}, calls=(), expected=(), shown=1
    )
    for name in BAD:
        with pytest.raises(ConfigError, match="leaves the folder"):
            write_repository(spec.model_copy(update={"files": {name: "x"}}), tmp_path / "bad")
    path = tmp_path / "a-1.tar.gz"
    with tarfile.open(path, "w:gz") as out:
        out.addfile(tarfile.TarInfo("a-1/../../out"), io.BytesIO(b""))
    with pytest.raises(ConfigError, match="no source archive"):
        extract(path, tmp_path / "new")
    assert not (tmp_path.parent / "out").exists() and not (tmp_path / "out").exists()


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


def test_a_rows_source_names_no_place_either(tmp_path: Path) -> None:
    row = instance_of({**ROW, "source": {"sdist": "../a", "version": "1", "sha256": "0" * 64}})
    with pytest.raises(ConfigError, match="a source of an unknown kind"):
        task_repository(row, tmp_path)


@needs_bubblewrap
def test_the_archive_of_a_row_is_found_by_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No code of it runs: the repository is its files before the patches."""
    file = archive(tmp_path / "files" / "a-1.tar.gz", top__a_py="x = 1\n", top__setup_py="raise SystemExit('ran')\n")
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    page = tmp_path / "simple" / "a-b" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="../../files/a-1.tar.gz#sha256={sha256}">a</a>')
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://127.0.0.1:{server.server_port}/simple")
        patch = "--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x = 0\n+x = 1"
        source = {"sdist": "a_b", "version": "1", "sha256": sha256, "label": "start"}
        row = instance_of({**ROW, "patch": patch, "source": source})
        with pytest.raises(InfrastructureError, match="has been changed") as refused:
            task_repository(row, tmp_path / "cache")
        files = {"a.py": "x = 0\n", "setup.py": "raise SystemExit('ran')\n"}
        commit = commit_of(files, who="swe-local")
        assert commit[:12] in str(refused.value)
        found = task_repository(row.model_copy(update={"base_commit": commit}), tmp_path / "cache")
        assert found is not None and (found / "refs/heads/main").read_text().strip() == commit
        other = row.model_copy(update={"extra": {"source": {**source, "sha256": "0" * 64}}})
        page.write_text(page.read_text().replace(sha256, "0" * 64))
        with pytest.raises(InfrastructureError, match="another sha256"):
            task_repository(other, tmp_path / "cache")
        server.shutdown()


def test_tests_and_requirements_are_kept_apart() -> None:
    tests = ("src/shop/tests/data.py", "tests/test_a.py", "tests/helpers.py", "conftest.py", "shop_test.py")
    assert all(map(is_test, tests)) and not any(map(is_test, ("src/shop/basket.py", "contest.py", "docs/conf.py")))
    unwanted = ("evil @ file:///evil-1.0.tar.gz", "-r /etc/passwd", "--index-url=x", "./evil", "a\nb")
    declared = f"[project]\ndependencies = {[*unwanted[:-1], 'attrs>=20', 'tomli; python_version < "3.11"']!r}\n"
    found = requirements_of({"pyproject.toml": declared}, ("pytest",))
    assert found == ("pytest", "attrs>=20", 'tomli; python_version < "3.11"')
    for wrong in unwanted:
        with pytest.raises(ConfigError, match="is no name with versions"):
            requirements_of({}, (wrong,))
