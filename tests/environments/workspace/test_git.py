"""Git on repositories that others wrote to: whatever they left there, nothing of it runs on this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
from needs import needs_bubblewrap

from openhands_rl_plugin.core.errors import ConfigError, RLError
from openhands_rl_plugin.environments.workspace.git import git_command, run_git
from openhands_rl_plugin.environments.workspace.patch import Baseline
from openhands_rl_plugin.environments.workspace.sandbox import BubblewrapSandbox
from openhands_rl_plugin.evals.swe.backends.local import _commit_changes
from openhands_rl_plugin.evals.swe.backends.repositories import MirrorSource, file_at, make_origin
from openhands_rl_plugin.evals.swe.types import Instance
from openhands_rl_plugin.evals.tasks.packages import Package, find_repository, open_git
from openhands_rl_plugin.evals.tasks.suite import _fixes
from openhands_rl_plugin.evals.tasks.trees import GitRepository

PACKAGE = Path(__file__).parents[3] / "openhands_rl_plugin"
SIGNED = """tree {tree}
author a <a@b> 0 +0000
committer a <a@b> 0 +0000
gpgsig -----BEGIN PGP SIGNATURE-----
 x
 -----END PGP SIGNATURE-----

signed
"""


COMMON, PARTIAL = "another common folder", "a partial clone"


class Planted:
    """A repository with one commit, and a program that marks that it ran."""

    def __init__(self, folder: Path) -> None:
        self.root, self.marker = folder / "work", folder / "ran"
        self.program = self.root / "evil.sh"
        self.root.mkdir()
        self.program.write_text(f"#!/bin/sh\ntouch {self.marker} /tmp/git/ran\ntimeout 0.2 cat\n")
        self.program.chmod(0o755)
        (self.root / "a.txt").write_text("one\n")
        self.git("init", "--quiet", "--initial-branch=main")
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message=start")

    def git(self, *words: str, given: str = "", check: bool = True) -> str:
        """What git on the host prints."""
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        options = {"input": given, "check": check, "capture_output": True, "text": True, "timeout": 60}
        return subprocess.run(command, cwd=self.root, **options).stdout.strip()

    def plant(self, way: Way) -> None:
        filled = {
            name: text.replace("EVIL", str(self.program)).replace("ROOT", str(self.root))
            for name, text in way.files.items()
        }
        for name, text in filled.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text)
            (self.root / name).chmod(0o755)
        for name, value in way.settings.items():
            self.git("config", name, value.replace("EVIL", str(self.program)).replace("ROOT", str(self.root)))
        if way.prepare is not None:
            way.prepare(self)


class Way(NamedTuple):
    """What is put into a repository, and the words of git that then run it where it may."""

    words: str
    settings: Mapping[str, str] = MappingProxyType({})
    files: Mapping[str, str] = MappingProxyType({})
    prepare: Callable[[Planted], object] | None = None


def signed(it: Planted) -> None:
    made = it.git("hash-object", "-t", "commit", "-w", "--stdin", given=SIGNED.format(tree=it.git("write-tree")))
    it.git("update-ref", "HEAD", made)


def without_a_file(it: Planted) -> None:
    blob = it.git("rev-parse", "HEAD:a.txt")
    (it.root / ".git" / "objects" / blob[:2] / blob[2:]).unlink()


def with_submodule(it: Planted) -> None:
    inner = str(it.root / "inner")
    it.git("init", "--quiet", inner)
    it.git("-C", inner, "commit", "--allow-empty", "--message=x")
    it.git("add", "--all")
    it.git("commit", "--quiet", "--message=inner")
    it.git("-C", inner, "config", "core.fsmonitor", str(it.program))


CHANGED = {"a.txt": "two\n"}
MONITOR = "[core]\n\trepositoryformatversion = 0\n\tfsmonitor = EVIL\n"
MODULE = '[submodule "inner"]\n\tpath = inner\n\turl = ./inner\n\tignore = none\n'
HOOK = "#!/bin/sh\nexec EVIL < /dev/null\n"
FILTERED, DRIVEN = ({**CHANGED, ".gitattributes": f"a.txt {each}=evil\n"} for each in ("filter", "diff"))
LAZY = {"core.repositoryformatversion": "1", "extensions.partialClone": "origin", "remote.origin.promisor": "true"}
WAYS = {
    "fsmonitor": Way("status", {"core.fsmonitor": "EVIL"}),
    "a hook before a commit": Way("commit -am x", {}, {**CHANGED, ".git/hooks/pre-commit": HOOK}),
    "a hook of the index": Way("add a.txt", {}, {**CHANGED, ".git/hooks/post-index-change": HOOK}),
    "a hook of references": Way("tag x", {}, {".git/hooks/reference-transaction": HOOK}),
    "a folder of hooks": Way("commit -am x", {"core.hooksPath": "ROOT/h"}, {**CHANGED, "h/pre-commit": HOOK}),
    "filter.clean": Way("add a.txt", {"filter.evil.clean": "EVIL"}, FILTERED),
    "filter.process": Way("add a.txt", {"filter.evil.process": "EVIL"}, FILTERED),
    "filter.smudge": Way("checkout -- a.txt", {"filter.evil.smudge": "EVIL"}, FILTERED),
    "textconv": Way("diff", {"diff.evil.textconv": "EVIL"}, DRIVEN),
    "the command of a driver": Way("diff", {"diff.evil.command": "EVIL"}, DRIVEN),
    "an external diff": Way("diff", {"diff.external": "EVIL"}, CHANGED),
    "include": Way("status", {"include.path": "ROOT/more"}, {"more": MONITOR}),
    "include on a condition": Way("status", {"includeIf.onbranch:main.path": "ROOT/more"}, {"more": MONITOR}),
    "settings of a work tree": Way("status", {"extensions.worktreeConfig": "true"}, {".git/config.worktree": MONITOR}),
    COMMON: Way(
        "status",
        files={".git/commondir": "../other", "other/config": MONITOR},
        prepare=lambda it: [
            shutil.copytree(it.root / ".git" / name, it.root / "other" / name) for name in ("objects", "refs")
        ],
    ),
    "gpg": Way("log -1", {"gpg.program": "EVIL", "log.showSignature": "true"}, prepare=signed),
    "ssh": Way("fetch origin", {"core.sshCommand": "EVIL", "remote.origin.url": "ssh://host/x", **LAZY}),
    "ext": Way("fetch origin", {"protocol.ext.allow": "always", "remote.origin.url": "ext::EVIL", **LAZY}),
    PARTIAL: Way(
        "cat-file -p HEAD:a.txt",
        {"remote.origin.url": "ROOT", "remote.origin.uploadpack": "EVIL", **LAZY},
        prepare=without_a_file,
    ),
    "a submodule": Way("status", files={".gitmodules": MODULE}, prepare=with_submodule),
}


@needs_bubblewrap
@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_a_repository_runs_here(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    it = Planted(tmp_path)
    it.plant(WAYS[way])
    head = it.git("rev-parse", "main" if way == COMMON else "HEAD")
    copy = shutil.copytree(it.root, tmp_path / "mirrors" / "owner" / "name", symlinks=True)
    checkout = shutil.copytree(it.root, tmp_path / "checkout", symlinks=True)
    it.marker.unlink(missing_ok=True)
    it.git(*WAYS[way].words.split(), check=False)
    assert it.marker.exists(), "without the sandbox it runs"
    it.marker.unlink()
    # No git that is started on the host: the sandbox does not see this one.
    trap = tmp_path / "trap"
    trap.mkdir()
    shutil.copy(it.program, trap / "git")
    monkeypatch.setenv("PATH", f"{trap}:{os.environ['PATH']}")
    instance = Instance(instance_id="a", repo="owner/name", base_commit=head)

    async def all_of_it() -> None:
        repository = GitRepository(checkout)
        if way == PARTIAL:
            with pytest.raises(ConfigError, match="a partial clone"):
                repository.tree(head)
        else:
            assert "evil.sh" in repository.tree(head).files
        found = find_repository(checkout)
        assert found.commit == head and found.times([head])
        assert isinstance([*_fixes(repository, "HEAD")], list)
        git = await MirrorSource(tmp_path / "mirrors").find(instance)
        assert git is not None and git == copy / ".git" and await file_at(git, head, "evil.sh")
        if way != PARTIAL:
            await make_origin(git, instance, tmp_path / "origin.git", "main")
        baseline, sandbox = Baseline(tmp_path), BubblewrapSandbox(checkout)
        baseline.remember(sandbox)
        assert baseline.changes(sandbox) == {"git_patch": "", "changed_files": {}}
        if way != PARTIAL:
            await _commit_changes(checkout)

    if way == COMMON:
        with pytest.raises(ConfigError, match="a linked work tree"):
            asyncio.run(all_of_it())
    else:
        asyncio.run(all_of_it())
    assert not it.marker.exists() and not (checkout / ".git" / "ran").exists()


@needs_bubblewrap
def test_other_repositories_of_this_machine_are_not_seen(tmp_path: Path):
    it = Planted(tmp_path)
    secret = tmp_path / "secret"
    subprocess.run(["git", "clone", "--quiet", str(it.root), str(secret)], check=True)
    hidden = it.git("-C", str(secret), "hash-object", "-w", "--stdin", given="a secret")
    (it.root / ".git/objects/info/alternates").write_text(f"{secret}/.git/objects\n")
    assert it.git("cat-file", "-p", hidden) == "a secret"
    with pytest.raises(ConfigError, match="cat-file failed"):
        GitRepository(it.root).git("cat-file", "-p", hidden)
    shutil.rmtree(it.root / ".git")
    for make in (lambda: (it.root / ".git").write_text(f"gitdir: {secret}/.git\n"), lambda: elsewhere(it, secret)):
        make()
        with pytest.raises(ConfigError, match="linked work tree or a submodule"):
            find_repository(it.root)
    (it.root / ".git").unlink()
    shutil.copytree(secret / ".git", it.root / ".git")
    shutil.rmtree(it.root / ".git/objects")
    (it.root / ".git/objects").symlink_to(secret / ".git/objects")
    with pytest.raises(ConfigError, match="no commit yet"):
        find_repository(it.root)


def elsewhere(it: Planted, secret: Path) -> None:
    (it.root / ".git").unlink()
    (it.root / ".git").symlink_to(secret / ".git")


@needs_bubblewrap
@pytest.mark.parametrize("where", ["ext::sh -c 'touch {}'", "--upload-pack=touch {}", "ssh://-oProxyCommand=touch {}"])
def test_an_address_runs_nothing(where: str, tmp_path: Path):
    marker = tmp_path / "ran"
    with pytest.raises(RLError):
        open_git(Package(name="a", git=where.format(marker)), tmp_path / "cache")
    command = git_command(None, "clone", "--", where.format(marker), "/tmp/x", network=True)
    with pytest.raises(subprocess.CalledProcessError):
        run_git(command)
    assert not marker.exists()


def test_one_place_starts_git():
    """The others run inside of sandboxes: for a row's own scripts, and started by ``git.py`` for a session's patch."""
    texts = {str(file.relative_to(PACKAGE)): file.read_text() for file in PACKAGE.rglob("*.py")}
    found = {name for name, text in texts.items() if '["git", ' in text}
    assert found == {"evals/swe/backends/shim/installing.py", "environments/workspace/recorder.py"}
    runs = {name for name, text in texts.items() if "exec git " in text}
    assert runs == {"environments/workspace/git.py"}
