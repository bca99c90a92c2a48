"""Shell and files of a container that another program owns, over a real socket and real sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from folder_container import FolderContainer, Ran
from needs import needs_bubblewrap

from openhands_rl_plugin.contrib.trainers.harbor_episode import served
from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.environments import container as container_module
from openhands_rl_plugin.environments.container import ContainerFiles, ContainerShell
from openhands_rl_plugin.environments.workspace.task_workspace import ContainerPlace

pytestmark = needs_bubblewrap

FOLDER = "/tmp/.session"


@pytest.fixture
async def container(tmp_path: Path) -> FolderContainer:
    return FolderContainer(tmp_path / "root")


@pytest.fixture
async def place(container: FolderContainer) -> AsyncIterator[ContainerPlace]:
    async with served(container) as socket:
        yield ContainerPlace(socket=socket, folder=FOLDER)


@pytest.fixture
async def shell(place: ContainerPlace) -> AsyncIterator[ContainerShell]:
    made = await asyncio.to_thread(ContainerShell, place)
    yield made
    await asyncio.to_thread(made.restart)
    await asyncio.to_thread(made.close)


async def said(shell: ContainerShell, command: str, timeout: float | None = 20.0) -> str:
    return (await asyncio.to_thread(shell.run, command, timeout=timeout)).output


async def test_a_shell_keeps_its_directory_variables_and_functions(shell: ContainerShell, container: FolderContainer):
    assert await said(shell, "pwd; id -u >/dev/null; echo one >&2; printf 'ü\\n\\x01'") == "/app\none\nü\n\x01"
    first = await asyncio.to_thread(shell.run, "cd /tmp; A='x  y'; f() { echo f-$1; }; export B=b; false", timeout=20.0)
    assert (first.exit_code, first.cwd, first.output) == (1, "/tmp", "")
    assert await said(shell, 'pwd; echo "$A"; f 1; env | grep ^B=') == "/tmp\nx  y\nf-1\nB=b\n"
    assert (await asyncio.to_thread(shell.run, "exit 3", timeout=20.0)).exit_code == 3
    assert "unexpected EOF" in await said(shell, "echo 'unclosed") and await said(shell, "pwd") == "/tmp\n"
    long = "x" * 3 * container_module.PIECE
    assert await said(shell, f"x={long}; echo ${{#x}}") == f"{len(long)}\n", "no argument takes so much"
    assert await said(shell, "cat") == "", "standard input is empty"
    assert container.root.joinpath(FOLDER[1:]).stat().st_mode & 0o777 == 0o700


async def test_what_is_in_the_background_is_told_later_and_outlives_the_session(
    place: ContainerPlace, container: FolderContainer
):
    shell = await asyncio.to_thread(ContainerShell, place)
    assert await said(shell, "(sleep 0.5; echo late) & (sleep 2; echo judged > /app/served) & echo now") == "now\n"
    await asyncio.sleep(1)
    told = await asyncio.to_thread(shell.run, "echo next", timeout=20.0)
    assert (told.earlier, told.output) == ("late\n", "next\n")
    await asyncio.to_thread(shell.close)
    assert not container.root.joinpath(FOLDER[1:]).exists(), "the session leaves nothing for who judges the work"
    for _ in range(100):
        if (container.root / "app/served").exists():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("a server that the agent started is gone before it is judged")


async def test_a_command_is_ended_by_time_by_an_interrupt_and_with_the_session(shell: ContainerShell, tmp_path: Path):
    late = await asyncio.to_thread(shell.run, "sleep 30; echo no", timeout=1.0)
    assert (late.timed_out, late.exit_code, late.output) == (True, None, "")
    running = asyncio.create_task(asyncio.to_thread(shell.run, "echo begun; sleep 30; echo no", timeout=None))
    await asyncio.sleep(1)
    await asyncio.to_thread(shell.interrupt)
    told = await asyncio.wait_for(running, 10)
    assert (told.exit_code, told.output) == (130, "begun\n")
    running = asyncio.create_task(asyncio.to_thread(shell.run, "A=1; sleep 30; echo no", timeout=None))
    await asyncio.sleep(1)
    await asyncio.to_thread(shell.restart)
    assert (await asyncio.wait_for(running, 10)).exit_code == 137
    assert await said(shell, "pwd; echo $A") == "/app\n\n", "a new shell"


async def test_files_are_read_and_written_with_the_rights_there(shell: ContainerShell, container: FolderContainer):
    root = container.root

    def use() -> None:
        data = bytes(range(256)) * 1000
        ContainerFiles(shell).write("/app/new folder/it's", data)
        assert (root / "app/new folder/it's").read_bytes() == data
        assert ContainerFiles(shell).read("/app/new folder/it's") == data
        (root / "app/run").write_text("old")
        (root / "app/run").chmod(0o750)
        (root / "app/link").symlink_to("/app/run")
        ContainerFiles(shell).write("/app/link", b"new")
        assert (root / "app/run").read_text() == "new" and (root / "app/run").stat().st_mode & 0o777 == 0o750
        for path, kind in {"/app": "directory", "/app/": "directory", "/app/run": "file", "/dev/null": "other"}.items():
            assert ContainerFiles(shell).kind(path) == kind
        absent = ContainerFiles(shell)
        assert (absent.kind("/app/none"), absent.kind("/none/none")) == (None, None)
        listed = ContainerFiles(shell)
        assert listed.entries("/app") == [("link", "other"), ("new folder", "directory"), ("run", "file")]
        assert listed.entries("/app/new folder") == [("it's", "file")]
        for call, why in (
            (lambda: ContainerFiles(shell).write("/usr/no", b""), "Read-only file system"),
            (lambda: ContainerFiles(shell).read("/dev/null"), "not a regular file"),
            (lambda: ContainerFiles(shell).write("/app/run/below", b""), "Not a directory|File exists"),
        ):
            with pytest.raises(OSError, match=why):
                call()
        (root / "app/big").write_bytes(b"\0" * (10 * 1024**2 + 1))
        with pytest.raises(OSError, match="larger than 10 MiB"):
            ContainerFiles(shell).read("/app/big")

    await asyncio.to_thread(use)
    assert shell.failure == "", "what is wrong with a path is no failure of the container"


class Broken(FolderContainer):
    """Answers what a test wants."""

    answer: Ran | Exception = RuntimeError("the sandbox is gone\nlong story")

    async def exec(self, command: str, *, timeout_sec: float | None = None) -> Ran:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_an_owner_that_fails_is_an_infrastructure_failure_in_one_line(tmp_path: Path):
    broken = Broken(tmp_path / "root")
    async with served(broken) as socket:
        place = ContainerPlace(socket=socket, folder=FOLDER)
        for answer, why in (
            (broken.answer, "RuntimeError: the sandbox is gone$"),
            (Ran("", "no such service", 125), "exit code 125: no such service$"),
            (Ran("openhands-rl-answer\nhalf", None, 0), "cut on its way"),
        ):
            broken.answer = answer
            with pytest.raises(InfrastructureError, match=why):
                await asyncio.to_thread(ContainerShell, place)
    with pytest.raises(InfrastructureError, match="does not answer"):
        await asyncio.to_thread(ContainerShell, place)


async def test_an_image_without_what_a_session_needs_is_named(place: ContainerPlace, container: FolderContainer):
    container.around = "PATH=/nothing\n{}"
    with pytest.raises(InfrastructureError, match="the image has no base64"):
        await asyncio.to_thread(ContainerShell, place)
