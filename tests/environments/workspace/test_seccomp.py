"""The filter of system calls: what it refuses, what works, and that other machines' numbers are not taken for ours."""

from __future__ import annotations

import errno
import platform
import stat
import struct
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from needs import needs_bubblewrap

from openhands_rl_plugin.environments.workspace.sandbox import BubblewrapSandbox
from openhands_rl_plugin.environments.workspace.seccomp import program
from openhands_rl_plugin.environments.workspace.shell import Shell

CALL = """
import ctypes, errno, sys
libc = ctypes.CDLL(None, use_errno=True)
for line in sys.argv[1:]:
    numbers = [ctypes.c_long(int(word, 0)) for word in line.split()]
    print(errno.errorcode.get(ctypes.get_errno()) if libc.syscall(*numbers) < 0 else "done")
    ctypes.set_errno(0)
"""

SETUID = """
import os
flags = os.O_WRONLY | os.O_CREAT
open("plain", "w").close()
def make(call, *given):
    try:
        call(*given)
    except OSError as error:
        print(error.strerror.lower())
make(os.open, "one", flags, 0o4755)
make(os.open, ".", os.O_WRONLY | os.O_TMPFILE, 0o2755)
make(os.mknod, "two", 0o104755)
make(os.chmod, "plain", 0o4755)
make(os.chmod, "plain", 0o2755)
with open("plain") as file:
    make(os.fchmod, file.fileno(), 0o6755)
"""

pytestmark = [
    needs_bubblewrap,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are those of x86-64"),
]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    (tmp_path / "call.py").write_text(CALL)
    shell = Shell(BubblewrapSandbox(tmp_path))
    yield shell
    shell.close()


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ("272 0x10000000", "EPERM"),  # unshare(CLONE_NEWUSER)
        ("56 0x10000011 0 0 0 0", "EPERM"),  # clone(CLONE_NEWUSER | SIGCHLD)
        ("435 0 0", "ENOSYS"),  # clone3
        ("425 8 0", "ENOSYS"),  # io_uring_setup
        ("321 0 0 0", "EPERM"),  # bpf
        ("323 1", "EPERM"),  # userfaultfd
        ("250 0 -3 0", "EPERM"),  # keyctl
        ("165 0 0 0 0 0", "EPERM"),  # mount
        ("16 0 0x5412 0", "EPERM"),  # ioctl(TIOCSTI)
        ("41 40 1 0", "EAFNOSUPPORT"),  # socket(AF_VSOCK)
        ("41 38 5 0", "EAFNOSUPPORT"),  # socket(AF_ALG)
        ("0x40000027", "ENOSYS"),  # getpid of x32
        ("39", "done"),  # getpid
        ("41 1 1 0", "done"),  # socket(AF_UNIX)
        ("41 16 3 0", "done"),  # socket(AF_NETLINK)
    ],
)
def test_calls(shell: Shell, call: str, answer: str):
    assert shell.run(f"python3 call.py '{call}'", timeout=20).output == f"{answer}\n"


def test_nothing_becomes_setuid(shell: Shell, tmp_path: Path):
    """Another user of the machine could execute it, outside of the sandbox."""
    (tmp_path / "make.py").write_text(SETUID)
    said = shell.run("python3 make.py; chmod u+s plain; chmod g+s plain; chmod 755 plain && echo fine", timeout=20)
    assert said.output.count("not permitted") == 6 and said.output.endswith("fine\n")
    modes = [path.lstat().st_mode for path in tmp_path.iterdir()]
    assert len(modes) == 3 and not any(mode & (stat.S_ISUID | stat.S_ISGID) for mode in modes)


def test_programs_that_make_folders_setgid_go_on(shell: Shell, tmp_path: Path):
    """As those do that work in a team's folder."""
    (tmp_path / "team").mkdir()
    (tmp_path / "team").chmod(0o2775)
    commands = (
        *("git init -q --shared new", "mkdir -p team/a team/b", "chmod u+w team/a", "chmod -R a+rX team"),
        *("install -m 2755 -d made", "cp -a team copied", "tar cf x.tar team", "mkdir out", "tar xpf x.tar -C out"),
        *("git -C team init -q", "touch team/a/f && chmod 755 team/a/f && test -x team/a/f"),
    )
    for command in commands:
        said = shell.run(command, timeout=20)
        assert (said.exit_code, said.output) == (0, ""), command
    assert not any(path.stat().st_mode & stat.S_ISGID for path in tmp_path.rglob("*") if path.is_file())


def test_programs_work(shell: Shell):
    threads = (
        "import threading as t, subprocess as s; x = t.Thread(target=s.run, args=(['true'],)); x.start(); x.join()"
    )
    assert shell.run(f'python3 -c "{threads}"; (sleep 0 & wait); bash -c "exec ls -d /"', timeout=20).output == "/\n"


def test_every_jump_of_both_machines_leads_into_the_filter():
    for machine, setuid in product(("x86_64", "aarch64"), (True, False)):
        lines = list(struct.iter_unpack("=HBBI", program(machine, setuid=setuid)))
        assert all(at + 1 + step < len(lines) for at, (_, *steps, _) in enumerate(lines) for step in steps if step)
        assert lines[-1][3] == 0x7FFF0000 and (6, 0, 0, 0x00050000 | errno.EPERM) in lines
    assert program("riscv64") == b""
