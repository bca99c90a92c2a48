"""What a session with a network for chosen hosts reaches: real sockets on loopback, a stub index, real sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import logging
import os
import signal
import socket
import socketserver
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from needs import needs_bubblewrap

from openhands_rl_plugin.environments.workspace.network.allowed import AllowedNetwork
from openhands_rl_plugin.environments.workspace.network.proxy import Proxy, RefusedTargetError, is_public
from openhands_rl_plugin.environments.workspace.sandbox import BubblewrapSandbox
from openhands_rl_plugin.environments.workspace.shell import CommandResult, Shell

Run = Callable[..., CommandResult]
WHEEL = "tiny-1.0-py3-none-any.whl"


def tiny_wheel() -> bytes:
    info = "tiny-1.0.dist-info"
    files = {
        "tiny.py": "NAME = 'tiny'\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": f"tiny.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n",
    }
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return made.getvalue()


class StubIndex(BaseHTTPRequestHandler):
    """One project with one wheel; keeps the requests. ``/large`` is 3 MiB, a POST is answered with its body."""

    seen: ClassVar[list[tuple[str, dict[str, str]]]] = []
    wheel = tiny_wheel()

    def do_GET(self) -> None:
        self.seen.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        digest = hashlib.sha256(self.wheel).hexdigest()
        pages = {
            "/simple/tiny/": f'<a href="/files/{WHEEL}#sha256={digest}">{WHEEL}</a>'.encode(),
            f"/files/{WHEEL}": self.wheel,
            "/large": b"x" * (3 * 1024**2),
        }
        self.reply(pages.get(self.path))

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.reply(self.rfile.read(int(self.headers["Content-Length"])))

    def reply(self, body: bytes | None) -> None:
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Type", "text/html" if self.path.startswith("/simple") else "application/octet-stream")
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body or b"")

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving(server: socketserver.TCPServer) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def index() -> Iterator[int]:
    StubIndex.seen.clear()
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), StubIndex)) as port:
        yield port


@contextlib.contextmanager
def session(folder: Path, allowed: AllowedNetwork) -> Iterator[Run]:
    shell = Shell(BubblewrapSandbox(folder, network=allowed))
    try:
        yield lambda command, timeout=60.0: shell.run(command, timeout=timeout)
    finally:
        shell.close()


def of_index(port: int, **more: object) -> AllowedNetwork:
    address = f"http://localhost:{port}/simple"
    variables = {"PIP_INDEX_URL": address, "UV_DEFAULT_INDEX": address}
    return AllowedNetwork.model_validate(
        {"hosts": ("pypi.org",), "index": (f"localhost:{port}",), "variables": variables, **more}
    )


def talk(text: str, then: str = "") -> str:
    """A command that sends ``text`` to the proxy and prints what comes back, into the pipe ``then``."""
    script = f"""import socket
with socket.create_connection(("127.0.0.1", 3128)) as proxy:
    proxy.sendall({text.encode()!r})
    proxy.shutdown(socket.SHUT_WR)
    while data := proxy.recv(65536):
        print(data.decode(), end="")
"""
    return f"python3 - <<'END' {then}\n{script}END"


def page(index: int) -> str:
    return talk(f"GET http://localhost:{index}/simple/tiny/ HTTP/1.1\r\n\r\n")


@needs_bubblewrap
def test_uv_installs_from_the_index_that_is_allowed(tmp_path: Path, index: int):
    uv = Path(sys.prefix) / "bin" / "uv"
    install = f"{uv} --no-config pip install --no-cache --python $(command -v python3) --target /workspace/to tiny"
    with session(tmp_path, of_index(index)) as run:
        result = run(install)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "to" / "tiny.py").read_text() == "NAME = 'tiny'\n"
    assert f"/files/{WHEEL}" in [path for path, _ in StubIndex.seen]


@needs_bubblewrap
def test_pip_downloads_from_the_index_that_is_allowed(tmp_path: Path, index: int):
    python = Path(sys.base_prefix) / "bin" / "python3"
    with session(tmp_path, of_index(index)) as run:
        if run(f"{python} -m pip --version").exit_code:
            pytest.skip("this Python has no pip")
        result = run(f"{python} -m pip download --no-cache-dir --no-deps -d /workspace tiny")
    assert result.exit_code == 0, result.output
    assert (tmp_path / WHEEL).read_bytes() == StubIndex.wheel


@needs_bubblewrap
def test_a_tunnel_passes_bytes_both_ways(tmp_path: Path):
    class Echo(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(self.rfile.read()[::-1])

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo)
    with serving(server) as port, session(tmp_path, of_index(port)) as run:
        said = run(talk(f"CONNECT localhost:{port} HTTP/1.1\r\n\r\nolleh")).output
    assert said.startswith("HTTP/1.1 200 ") and said.endswith("\r\n\r\nhello")


@needs_bubblewrap
def test_a_plain_request_goes_to_the_host_that_was_checked_and_carries_nothing_of_the_proxy(tmp_path: Path, index: int):
    head = f"GET http://localhost:{index}/other?a=1 HTTP/1.1\r\nHost: evil.example\r\nProxy-Authorization: x\r\n\r\n"
    second = f"GET http://localhost:{index}/second HTTP/1.1\r\nHost: evil.example\r\n\r\n"
    post = f"POST http://localhost:{index}/ HTTP/1.1\r\nContent-Length: 4\r\n\r\nbodymore"
    with session(tmp_path, of_index(index)) as run:
        assert run(talk(head + second)).output.startswith("HTTP/1.0 404 ")
        assert run(talk(post)).output.endswith("\r\n\r\nbody")
    ((path, headers),) = StubIndex.seen
    assert path == "/other?a=1" and headers == {"host": f"localhost:{index}", "connection": "close"}


@needs_bubblewrap
@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("CONNECT evil.example:443", "evil.example:443: is not in [rl.workspace] network"),
        ("CONNECT pypi.org:22", "pypi.org:22: its port is not in [rl.workspace] network"),
        ("CONNECT below.pypi.org:443", "below.pypi.org:443: is not in [rl.workspace] network"),
        ("CONNECT 127.0.0.1:{port}", "127.0.0.1:{port}: addresses are not allowed, only names"),
        ("CONNECT [::1]:{port}", "[::1]:{port}: addresses are not allowed, only names"),
        ("CONNECT 2130706433:{port}", "2130706433:{port}: addresses are not allowed, only names"),
        ("CONNECT localhost:{port}", "localhost:{port}: its address is private"),
        ("GET http://localhost:{port}/", "localhost:{port}: its address is private"),
        ("GET http://evil.example/", "evil.example:80: is not in [rl.workspace] network"),
        ("GET http://me:pass@pypi.org/", "(malformed): is no http:// address without a login"),
        ("GET /simple", "(malformed): is no http:// address without a login"),
        ("CONNECT pypi.org", "(malformed): is no host:port"),
    ],
)
def test_what_is_refused(target: str, why: str, tmp_path: Path, index: int):
    """``localhost`` is a name with a private address, which is allowed for an index only."""
    allowed = AllowedNetwork(hosts=("pypi.org", f"localhost:{index}"))
    with session(tmp_path, allowed) as run:
        said = run(talk(f"{target.format(port=index)} HTTP/1.1\r\n\r\n")).output
    assert said.startswith("HTTP/1.1 40") and said.endswith(f"\r\n\r\n{why.format(port=index)}\n")
    assert StubIndex.seen == []


@needs_bubblewrap
def test_bodies_whose_end_two_readers_could_see_elsewhere_are_refused(tmp_path: Path, index: int):
    with session(tmp_path, of_index(index)) as run:
        for headers in ("Transfer-Encoding: chunked", "Content-Length: 1\r\nContent-Length: 2", "Content-Length: +1"):
            said = run(talk(f"POST http://localhost:{index}/ HTTP/1.1\r\n{headers}\r\n\r\nxx")).output
            assert said.startswith("HTTP/1.1 4")


@needs_bubblewrap
def test_there_is_no_way_beside_the_proxy(tmp_path: Path, index: int):
    with session(tmp_path, AllowedNetwork(hosts=("pypi.org",))) as run:
        assert run(f"exec 3<>/dev/tcp/127.0.0.1/{index}").exit_code != 0
        # What listens in the sandbox is reached directly.
        assert run("python3 -m http.server 8123 --bind 127.0.0.1 >/dev/null 2>&1 & sleep 1; echo up").output == "up\n"
        here = 'import urllib.request; print(urllib.request.urlopen("http://localhost:8123/").status)'
        assert run(f"python3 -c '{here}'").output == "200\n"


@needs_bubblewrap
def test_a_fork_has_the_same_network_also_to_an_index_on_loopback_by_its_address(tmp_path: Path, index: int):
    twin = BubblewrapSandbox(tmp_path, network=AllowedNetwork(hosts=(), index=(f"127.0.0.1:{index}",))).over(tmp_path)
    shell = Shell(twin)
    ask = f'import urllib.request; print(urllib.request.urlopen("http://127.0.0.1:{index}/simple/tiny/").status)'
    assert shell.run(f"python3 -c '{ask}'", timeout=20).output == "200\n"
    shell.close()


@needs_bubblewrap
def test_refused_hosts_are_logged_once_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING), session(tmp_path, AllowedNetwork(hosts=("pypi.org",))) as run:
        for _ in range(3):
            run(talk("CONNECT evil.example:443 HTTP/1.1\r\n\r\n"))
        run(talk("CONNECT other.example:443 HTTP/1.1\r\n\r\n"))
    said = [record.getMessage() for record in caplog.records]
    assert [text for text in said if "evil.example:443 was refused" in text] == [
        "a session's network: evil.example:443 was refused: is not in [rl.workspace] network"
    ]
    assert said[-1] == "a session's network: 4 refused in all: evil.example:443 (3), other.example:443 (1)"


@needs_bubblewrap
def test_the_log_stays_short_when_many_hosts_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    many = """import socket
for number in range(600):
    with socket.create_connection(("127.0.0.1", 3128)) as proxy:
        proxy.sendall(b"CONNECT h%d.example:443 HTTP/1.1\\r\\n\\r\\n" % number)
        proxy.recv(1000)
"""
    with caplog.at_level(logging.WARNING), session(tmp_path, AllowedNetwork(hosts=("pypi.org",))) as run:
        assert run(f"python3 - <<'END'\n{many}END").exit_code == 0
    assert len(caplog.records) == 502 and "600 refused in all" in caplog.records[-1].getMessage()


@needs_bubblewrap
def test_the_process_that_reads_what_commands_send_has_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_API_KEY", "k-83hf7d")
    marker = f"keys{os.getpid()}.example"
    with session(tmp_path, AllowedNetwork(hosts=(marker,))) as run:
        run("true")
        (proxy,) = found(marker)
        assert b"k-83hf7d" not in (proxy / "environ").read_bytes()


@needs_bubblewrap
def test_an_idle_connection_ends(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with session(tmp_path, of_index(port, idle=0.4)) as run:
            began = time.monotonic()
            said = run(talk(f"CONNECT localhost:{port} HTTP/1.1\r\n\r\n"), 20.0).output
    assert said.startswith("HTTP/1.1 200 ") and time.monotonic() - began > 0.4


@needs_bubblewrap
def test_a_session_has_so_much_traffic_and_no_more(tmp_path: Path, index: int):
    get = talk(f"GET http://localhost:{index}/large HTTP/1.1\r\n\r\n", "2>&1 | wc -c")
    with session(tmp_path, of_index(index, traffic=4 * 1024**2)) as run:
        assert int(run(get).output) > 3 * 1024**2
        assert int(run(get).output) < 1024**2
        assert "the session's traffic is used up" in run(talk(f"GET http://localhost:{index}/ HTTP/1.1\r\n\r\n")).output


@needs_bubblewrap
def test_connections_are_bounded_and_others_go_on(tmp_path: Path, index: int):
    crowd = (
        "import socket\nheld = [socket.create_connection(('127.0.0.1', 3128)) for _ in range(140)]\n"
        "held[-1].settimeout(10)\nprint(held[-1].recv(100).decode().splitlines()[0])\n"
    )
    with session(tmp_path, of_index(index)) as run:
        assert run(f"python3 - <<'END'\n{crowd}END").output == "HTTP/1.1 503 Refused\n"
        assert run(talk(f"GET http://localhost:{index}/simple/tiny/ HTTP/1.1\r\n\r\n")).output.startswith(
            "HTTP/1.0 200"
        )


@needs_bubblewrap
@pytest.mark.parametrize("end", ["close", "kill"])
def test_the_proxy_ends_with_the_session_and_with_its_host(end: str, tmp_path: Path):
    marker = f"marker{os.getpid()}{end}.example"
    pid = os.fork()
    if pid == 0:
        shell = Shell(BubblewrapSandbox(tmp_path, network=AllowedNetwork(hosts=(marker,))))
        shell.run("true", timeout=20)
        (tmp_path / "seen").write_text(str(alive(marker)))
        if end == "close":
            shell.close()
            (tmp_path / "closed").write_text(str(alive(marker)))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert (tmp_path / "seen").read_text() == "True"
    if end == "close":
        assert (tmp_path / "closed").read_text() == "False"
    deadline = time.monotonic() + 5
    while alive(marker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(marker)


def alive(marker: str) -> bool:
    return bool(found(marker))


def found(marker: str) -> list[Path]:
    """The folders in ``/proc`` of the processes whose command line holds ``marker``."""
    folders = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and marker.encode() in (entry / "cmdline").read_bytes():
                folders.append(entry)
    return folders


@needs_bubblewrap
def test_commands_cannot_take_the_proxy_away(tmp_path: Path, index: int):
    with session(tmp_path, of_index(index)) as run:
        run("kill -9 -1")
        assert run(talk(f"GET http://localhost:{index}/simple/tiny/ HTTP/1.1\r\n\r\n")).output.startswith(
            "HTTP/1.0 200"
        )
        assert "Address already in use" in run("python3 -m http.server 3128 --bind 127.0.0.1").output


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1", "::1"),
        *("fe80::1%eth0", "fd00::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::1", "::", "ff02::1"),
    ],
)
def test_private_addresses_in_every_form(address: str):
    assert not is_public(address)


def test_public_addresses():
    assert all(map(is_public, ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")))


def test_names_below_a_name_and_ports():
    proxy = Proxy({"hosts": ["*.example.com", "plain.example:8443"], "index": [], "traffic": 1, "idle": 1})
    allowed = [("a.example.com", 443), ("a.b.example.com", 80), ("plain.example", 8443)]
    assert [proxy.why_not(*each) for each in allowed] == ["", "", ""]
    for host, port in [("example.com", 443), ("badexample.com", 443), ("plain.example", 443), ("a.example.com", 8443)]:
        assert proxy.why_not(host, port)


async def test_the_address_that_was_checked_is_the_one_that_is_used(monkeypatch: pytest.MonkeyPatch):
    """A name that has another address at every question; nothing here can be a name server, so the answers are made."""
    answers, used = ["127.0.0.1", "8.8.8.8", "127.0.0.1"], []

    async def look_up(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answers.pop(0), port))]

    async def open_connection(host: str, port: int, **_: object) -> None:
        used.append(host)
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    proxy = Proxy({"hosts": ["a.example"], "index": [], "traffic": 1, "idle": 1})
    with pytest.raises(RefusedTargetError, match="its address is private"):
        await proxy.connect("a.example:443")
    with pytest.raises(RefusedTargetError, match="cannot be reached"):
        await proxy.connect("a.example:443")
    assert used == ["8.8.8.8"] and answers == ["127.0.0.1"]
