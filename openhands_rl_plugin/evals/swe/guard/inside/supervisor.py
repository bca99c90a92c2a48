"""The parent of a pytest process. It owns the channel on which the plugin reports, and signs what it received.

``python -I -S -c CODE PLUGIN COMMAND...``, with the random word on stdin. The child cannot read this process's memory:
it is not dumpable, and it holds a capability that the child is without, as the shell does, which has the word as well.
"""

import contextlib
import ctypes
import hashlib
import hmac
import json
import os
import select
import subprocess
import sys
import time

GUARD, OUT = "/guard", "/guard-out"
MOST = 48 * 2**20
SET_DUMPABLE, DROP_CAPABILITY, SETPCAP = 4, 24, 8


def prctl(option: int, value: int) -> None:
    """Where the kernel refuses, the guard is weaker, and the tests run all the same."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class Lines:
    """Takes the lines of a child: each begins with the digest that its key, used once, gives the rest."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.rest = b""
        self.size = 0
        self.taken = []
        self.forged = 0

    def take(self, chunk: bytes) -> None:
        self.size += len(chunk)
        if self.size > MOST:
            return
        lines = (self.rest + chunk).split(b"\n")
        self.rest = lines.pop()
        for line in lines:
            digest, _, text = line.partition(b" ")
            made = hashlib.blake2b(text, key=self.key, digest_size=32).hexdigest()
            if not hmac.compare_digest(digest, made.encode()):
                self.forged += 1
                continue
            self.key = hashlib.blake2b(self.key, digest_size=32).digest()
            self.taken.append(json.loads(text.decode()))


def environment(plugin: str, numbers: list) -> dict:
    """The child's variables, and in one of them what the plugin needs, with the values that it puts back."""
    before = [os.environ.get(name) for name in ("PYTEST_ADDOPTS", "PYTHONPATH")]
    told = "\x1f".join([*map(str, numbers), plugin, *("0" if each is None else "1" + each for each in before)])
    changed = {
        "PYTEST_ADDOPTS": " ".join(filter(None, (before[0], "-p " + plugin))),
        # First, so that its ``sitecustomize`` is the one.
        "PYTHONPATH": os.pathsep.join(filter(None, (GUARD, before[1]))),
    }
    return dict(os.environ, OPENHANDS_RL_GUARD=told, **changed)


def watch(child: subprocess.Popen, reading: int, lines: Lines) -> None:
    """Until the child has ended and the channel is empty. What the child left running may hold it open."""
    os.set_blocking(reading, False)
    while True:
        ended = child.poll() is not None
        if not select.select([reading], [], [], 0 if ended else 0.1)[0]:
            if ended:
                return
            continue
        chunk = os.read(reading, 65536)
        if not chunk:
            child.wait()
            return
        lines.take(chunk)


def main(plugin: str, command: list) -> int:
    word = sys.stdin.buffer.readline().strip(b"+ \n")
    prctl(SET_DUMPABLE, 0)
    key = os.urandom(32)
    key_out, key_in = os.pipe()
    os.write(key_in, key)
    os.close(key_in)
    reading, writing = os.pipe()
    began = time.time()
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=environment(plugin, [key_out, writing]),
            pass_fds=[key_out, writing],
            preexec_fn=lambda: prctl(DROP_CAPABILITY, SETPCAP),
        )
    except OSError as error:
        print(command[0] + ": " + error.strerror, file=sys.stderr)
        return 127
    os.close(key_out)
    os.close(writing)
    lines = Lines(key)
    watch(child, reading, lines)
    record = {
        "status": child.returncode,
        "began": began,
        "events": lines.taken,
        "forged": lines.forged,
        "cut": lines.size > MOST,
    }
    body = json.dumps(record).encode()
    with open("%s/%d.run" % (OUT, os.getpid()), "wb") as file:  # noqa: UP031
        file.write(hmac.new(word, body, "sha256").hexdigest().encode() + b"\n" + body)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
