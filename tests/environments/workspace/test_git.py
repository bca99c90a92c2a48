"""Git on repositories that others wrote to: whatever they left there, nothing of it runs on this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from needs import needs_bubblewrap

from openhands_rl_plugin.core.errors import ConfigError, RLError
from openhands_rl_plugin.environments.workspace.git import git_command, run_git
from openhands_rl_plugin.environments.workspace.patch import Baseline
from openhands_rl_plugin.environments.workspace.sandbox import BubblewrapSandbox
from openhands_rl_plugin.evals.swe.backends import LocalBackend, make_origin
from openhands_rl_plugin.evals.swe.instances import Instance
from openhands_rl_plugin.evals.tasks.source import Source, commit_files, find_source

PACKAGE = Path(__file__).parents[3] / "openhands_rl_plugin"
COMMON, PARTIAL = "another common folder", "a partial clone"
SHELL = r"""
hook() { printf '#!/bin/sh\nexec %s < /dev/null\n' $EVIL > .git/hooks/$1; chmod 755 .git/hooks/$1; echo two > a.txt; }
attribute() { echo "a.txt $1=evil" > .gitattributes; git config $1.evil.$2 $EVIL; echo two > a.txt; }
monitor() { printf '[core]\n\trepositoryformatversion = 0\n\tfsmonitor = %s\n' $EVIL > $1; }
lazy() { git config remote.origin.url $1; for at in core.repositoryformatversion=1 extensions.partialClone=origin \
  remote.origin.promisor=true; do git config ${at%%=*} ${at#*=}; done; }
signed() { printf 'tree %s\nauthor a <a@b> 0 +0000\ncommitter a <a@b> 0 +0000\ngpgsig -----BEGIN PGP SIGNATURE-----\n'\
' x\n -----END PGP SIGNATURE-----\n\nsigned\n' $(git write-tree) | git hash-object -t commit -w --stdin; }
set -e
"""
# What is put into a repository, by the words of git that then run it where they may.
WAYS = {
    "fsmonitor": ("status", "git config core.fsmonitor $EVIL"),
    "a hook before a commit": ("commit -am x", "hook pre-commit"),
    "a hook of the index": ("add a.txt", "hook post-index-change"),
    "a folder of hooks": ("commit -am x", "hook pre-commit; git config core.hooksPath $PWD/h; mv .git/hooks h"),
    "filter.clean": ("add a.txt", "attribute filter clean"),
    "filter.smudge": ("checkout -- a.txt", "attribute filter smudge"),
    "textconv": ("diff", "attribute diff textconv"),
    "an external diff": ("diff", "git config diff.external $EVIL; echo two > a.txt"),
    "include": ("status", "monitor more; git config include.path $PWD/more"),
    "settings of a work tree": ("status", "git config extensions.worktreeConfig true; monitor .git/config.worktree"),
    COMMON: (
        "status",
        "mkdir other; cp -r .git/objects .git/refs other; monitor other/config; echo ../other > .git/commondir",
    ),
    "gpg": ("log -1", "git config gpg.program $EVIL; git config log.showSignature true; git update-ref HEAD $(signed)"),
    "ssh": ("fetch origin", "git config core.sshCommand $EVIL; lazy ssh://host/x"),
    "ext": ("fetch origin", "git config protocol.ext.allow always; lazy ext::$EVIL"),
    PARTIAL: (
        "cat-file -p HEAD:a.txt",
        "rm .git/objects/$(git rev-parse HEAD:a.txt | sed s,..,\\&/,); lazy $PWD;"
        "git config remote.origin.uploadpack $EVIL",
    ),
    "a submodule": (
        "status",
        r"""git init -q inner; git -C inner commit -q --allow-empty -m x; git -C inner config core.fsmonitor $EVIL
        printf '[submodule "inner"]\n\tpath = inner\n\turl = ./inner\n\tignore = none\n' > .gitmodules
        git add --all; git commit -qm inner""",
    ),
}


class Planted:
    """A repository with one commit, and a program that marks that it ran."""

    def __init__(self, folder: Path) -> None:
        self.root, self.marker = folder / "work", folder / "ran"
        self.program = self.root / "evil.sh"
        self.root.mkdir()
        self.program.write_text(f"#!/bin/sh\ntouch {self.marker} /tmp/git/ran\ntimeout 0.2 cat\n")
        self.program.chmod(0o755)
        (self.root / "a.txt").write_text("one\n")
        self.shell("git init -q --initial-branch=main; git add --all; git commit -qm start")

    def shell(self, script: str, *, check: bool = True) -> str:
        """What a script on the host prints."""
        who = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        options = {"check": check, "capture_output": True, "text": True, "timeout": 60, "stdin": subprocess.DEVNULL}
        variables = {**os.environ, **who, "EVIL": str(self.program)}
        return subprocess.run(["bash", "-c", SHELL + script], cwd=self.root, env=variables, **options).stdout.strip()


@needs_bubblewrap
@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_a_repository_runs_here(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    it = Planted(tmp_path)
    words, script = WAYS[way]
    head = it.shell(f"{script}; git --git-dir=.git rev-parse {'main' if way == COMMON else 'HEAD'}").splitlines()[-1]
    copy = shutil.copytree(it.root / ".git", tmp_path / "mirrors" / "owner" / "name.git", symlinks=True)
    checkout = shutil.copytree(it.root, tmp_path / "checkout", symlinks=True)
    it.marker.unlink(missing_ok=True)
    it.shell(f"git {words}", check=False)
    assert it.marker.exists(), "without the sandbox it runs"
    it.marker.unlink()
    # No git that is started on the host: the sandbox does not see this one.
    trap = tmp_path / "trap"
    trap.mkdir()
    shutil.copy(it.program, trap / "git")
    monkeypatch.setenv("PATH", f"{trap}:{os.environ['PATH']}")
    instance = Instance(instance_id="a", repo="owner/name", base_commit=head)

    async def all_of_it() -> None:
        found = find_source(str(checkout), "HEAD", tmp_path)
        assert found.commit == head and not found.texts(head) and found.read("log", "--name-status", head)
        if way != PARTIAL:
            assert commit_files(tmp_path / "base.git", found, "start") != head
        git = LocalBackend(cache=tmp_path, mirror=tmp_path / "mirrors").repository(instance)
        assert git == copy
        if way != PARTIAL:
            await make_origin(git, instance, tmp_path / "origin.git", "main")
        baseline, sandbox = Baseline(tmp_path), BubblewrapSandbox(checkout)
        baseline.remember(sandbox)
        assert baseline.changes(sandbox) == {"git_patch": "", "changed_files": {}}

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
    hidden = it.shell(f"printf 'a secret' | git -C {secret} hash-object -w --stdin")
    (it.root / ".git/objects/info/alternates").write_text(f"{secret}/.git/objects\n")
    assert it.shell(f"git cat-file -p {hidden}") == "a secret"
    with pytest.raises(ConfigError, match="cat-file failed"):
        Source(name="a", git="a", place=it.root / ".git", commit="HEAD").read("cat-file", "-p", hidden)
    shutil.rmtree(it.root / ".git")
    for make in (lambda: (it.root / ".git").write_text(f"gitdir: {secret}/.git\n"), lambda: elsewhere(it, secret)):
        make()
        with pytest.raises(ConfigError, match="linked work tree or a submodule"):
            find_source(str(it.root), "HEAD", tmp_path)
    (it.root / ".git").unlink()
    shutil.copytree(secret / ".git", it.root / ".git")
    shutil.rmtree(it.root / ".git/objects")
    (it.root / ".git/objects").symlink_to(secret / ".git/objects")
    with pytest.raises(ConfigError, match="has no commit HEAD"):
        find_source(str(it.root), "HEAD", tmp_path)


def elsewhere(it: Planted, secret: Path) -> None:
    (it.root / ".git").unlink()
    (it.root / ".git").symlink_to(secret / ".git")


@needs_bubblewrap
@pytest.mark.parametrize("where", ["ext::sh -c 'touch {}'", "--upload-pack=touch {}", "ssh://-oProxyCommand=touch {}"])
def test_an_address_runs_nothing(where: str, tmp_path: Path):
    marker = tmp_path / "ran"
    with pytest.raises(RLError):
        find_source(where.format(marker), "HEAD", tmp_path / "cache")
    command = git_command(None, "clone", "--", where.format(marker), "/tmp/x", network=True)
    with pytest.raises(subprocess.CalledProcessError):
        run_git(command)
    assert not marker.exists()


def test_one_place_starts_git():
    """The others run inside of sandboxes: for a row's own scripts, and started by ``git.py`` for a session's patch."""
    texts = {str(file.relative_to(PACKAGE)): file.read_text() for file in PACKAGE.rglob("*.py")}
    found = {name for name, text in texts.items() if '["git", ' in text or '("git",)' in text}
    assert found == {"evals/swe/shim/installing.py", "environments/workspace/recorder.py"}
    runs = {name for name, text in texts.items() if "exec git " in text}
    assert runs == {"environments/workspace/git.py"}
