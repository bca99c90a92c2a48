"""Runs what a page of the documentation says, in an empty home and a folder of its own.

- ``console``: each ``$ command`` runs in bash; what is shown below it has to come. ``...`` stands for anything, eight
  hex digits for an id, which later commands get as it really was, and widths of columns do not count. A command that
  ends in ``&`` runs until the page ends; the next one waits until it listens.
- ``python``: with ``title="x.py"`` it becomes a file, else it runs here; the blocks of a page share their names.
- ``toml``: read by the project's own reader; with ``title`` it becomes a file.
- ``<!-- needs: v0 -->`` before a block: only where that is installed.
- ``<!-- numbers: of one run -->`` before a block: each number that is shown stands for any number.

Ports of the pages become free ones.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from needs import missing_bubblewrap
from sybil import Document, Example, Lexeme, Region, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

from openhands_rl_plugin.config.host import installed_hosts
from openhands_rl_plugin.config.toml import settings_from_sections

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BIN = Path(sys.executable).parent.resolve()  # where programs of an environment that is a link say they are
PORTS = ("8100", "8101", "8200", "8400", "8000")
NEEDS = {
    "v0": "v0" in installed_hosts(),
    # V0 comes with a copy of the SDK, which runs V1 only where V0 is not.
    "v1": installed_hosts() == ("v1",),
    "torch": find_spec("torch") is not None,
    "gymnasium": find_spec("gymnasium") is not None,
    "bubblewrap": not missing_bubblewrap(),
}
_TITLE = re.compile(r'title="([^"]+)"')
_BLOCK = re.compile(r"(?P<language>[\w-]*)[ \t]*(?P<info>[^\n]*)\n")
_HEX = re.compile(r"(?<![\w-])[0-9a-f]{8}(?![\w-])")
# In a text that `re.escape` has gone over.
_NUMBER = re.compile(r"(?<![\w-])(?:\\[+-])?\d[\d,]*(?:\\?\.\d+)?")
_EXPORT = re.compile(r"export (\w+)=(\S+)")
_SECONDS = 1800


def blocks(path: Path) -> list[Example]:
    """Every fenced block of a page; ``example.region.lexemes`` has ``language``, ``info`` and ``source``."""
    lexer = RawFencedCodeBlockLexer(_BLOCK)

    def parse(document: Document) -> Iterator[Region]:
        for region in lexer(document):
            yield Region(region.start, region.end, region.lexemes["source"], _nothing, region.lexemes)

    return list(Sybil([parse], pattern="*").parse(path))


def language_of(example: Example) -> str:
    return example.region.lexemes["language"]


def title_of(example: Example) -> str:
    found = _TITLE.search(example.region.lexemes["info"])
    return found[1] if found else ""


def note(example: Example, name: str) -> list[str]:
    """The words of ``<!-- name: words -->`` before a block."""
    before = example.document.text[: example.region.start]
    found = re.search(r"(?:<!-- \w+: [\w ]+ -->\s*)+$", before)
    return [
        word for noted in re.findall(rf"<!-- {name}: ([\w ]+) -->", found[0] if found else "") for word in noted.split()
    ]


def missing(example: Example) -> str:
    """What the block needs and is not here; empty where it can run."""
    return " ".join(name for name in note(example, "needs") if not NEEDS[name])


def commands(text: str) -> list[tuple[str, str]]:
    """The commands of a console block, and what is shown below each."""
    found: list[tuple[str, str]] = []
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = re.sub(r"\\\n\s*", "", part).partition("\n")
        found.append((command.strip(), shown.strip()))
    return found


def _nothing(example: Example) -> None:
    del example


@dataclass
class Session:
    """A terminal in a folder. ``changes``: what is written otherwise than in the page, by regular expression."""

    folder: Path
    changes: Mapping[str, str] = field(default_factory=dict)
    printed: list[str] = field(default_factory=list)
    _known: dict[str, str] = field(default_factory=dict)
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _namespace: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.folder / "home").mkdir(parents=True, exist_ok=True)
        self.ports = dict(zip(PORTS, _free_ports(len(PORTS)), strict=True))
        machine = {name: text for name, text in os.environ.items() if name.startswith(("UV_", "PIP_", "SSL_CERT_"))}
        self.environ = machine | {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.folder / "home"),
            "TMPDIR": str(self.folder),
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "160",
        }

    def __enter__(self) -> Session:
        sys.path.insert(0, str(self.folder))
        return self

    def __exit__(self, *_: object) -> None:
        sys.path.remove(str(self.folder))
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(f"{self.folder}{os.sep}"):
                del sys.modules[name]
        for process in self._running:
            os.killpg(process.pid, signal.SIGTERM)
        for process in self._running:
            process.wait(60)

    def play(self, page: Path) -> int:
        """Run a page; the number of blocks that ran."""
        blocks_run = 0
        for example in blocks(page):
            if missing(example):
                continue
            source, where = example.parsed, f"{page.relative_to(ROOT)}:{example.line}"
            match language_of(example), title_of(example):
                case "console", _:
                    self.console(source, where, any_number=bool(note(example, "numbers")))
                case (("toml" | "python" | "json" | "text"), str(title)) if title:
                    self.write(title, source)
                case "python", _:
                    self.python(example)
                case _:
                    continue
            blocks_run += 1
        return blocks_run

    def console(self, text: str, where: str, any_number: bool = False) -> None:
        """Raises ``AssertionError`` where a command fails, or shows something else than the page."""
        for command, shown in commands(text):
            real = self._real(command)
            if exported := _EXPORT.fullmatch(real):
                self.environ[exported[1]] = exported[2].replace("$PWD", str(self.folder))
                continue
            if real.endswith("&"):
                self._start(real.removesuffix("&"), where)
                continue
            done = subprocess.run(
                ["bash", "-c", real],
                cwd=self.folder,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_SECONDS,
            )
            self.printed.append(done.stdout)
            for written in self.folder.glob("*.toml"):
                written.write_text(self._changed(written.read_text()))
            fails = shown.startswith("error:")
            assert bool(done.returncode) == fails, f"{where}: {real}\nexit code {done.returncode}\n{done.stdout}"
            if shown:
                self._compare(shown, done.stdout, f"{where}: {real}", any_number)

    def write(self, name: str, text: str) -> None:
        """A file of the page; a second one of the same name that begins with a comment "added" is appended."""
        path = self.folder / name.removesuffix(" (added)")
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text() + "\n" if name.endswith(" (added)") else ""
        path.write_text(before + self._real(text))
        if path.suffix == ".toml" and path.name != "pyproject.toml":
            settings_from_sections(tomllib.loads(path.read_text()))

    def python(self, example: Example) -> None:
        """In this process, in the folder of the page."""
        source = example.parsed
        example.parsed = Lexeme(self._real(source), source.offset, source.line_offset)
        example.namespace.update(self._namespace)
        before, environ = Path.cwd(), dict(os.environ)
        os.chdir(self.folder)
        os.environ.update({name: self.environ[name] for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME")})
        try:
            PythonEvaluator()(example)
        finally:
            os.chdir(before)
            os.environ.clear()
            os.environ.update(environ)
        self._namespace.update(example.namespace)

    def _real(self, text: str) -> str:
        for port, free in self.ports.items():
            text = re.sub(rf"(?<=[: ]){port}(?![0-9])", str(free), text)
        for shown, real in self._known.items():
            text = text.replace(shown, real)
        return self._changed(text)

    def _changed(self, text: str) -> str:
        for pattern, new in self.changes.items():
            text = re.sub(pattern, new, text)
        return text

    def _start(self, command: str, where: str) -> None:
        log = self.folder / f"server-{len(self._running)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append(process)
        ports = [int(port) for port in map(str, self.ports.values()) if f"--port {port}" in command]
        assert ports, f"{where}: which port does it listen on? {command}"
        for _ in range(600):
            assert process.poll() is None, f"{where}: {command}\n{log.read_text()}"
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", ports[0])) == 0:
                    return
            time.sleep(0.2)
        raise AssertionError(f"{where}: nothing listens: {command}\n{log.read_text()}")

    def _compare(self, shown: str, came: str, where: str, any_number: bool) -> None:
        """``shown`` as a pattern; ids that it names are kept."""
        names: list[str] = []
        pattern = ""
        for part in re.split(r"(\s*\.\.\.\s*|\s+|(?<![\w-])[0-9a-f]{8}(?![\w-]))", shown):
            if part.strip() == "...":
                pattern += ".*?"
            elif part.isspace():
                pattern += r"\s+"
            elif _HEX.fullmatch(part) and part not in self._known:
                pattern += f"(?P=id_{part})" if part in names else f"(?P<id_{part}>[0-9a-f]{{8}})"
                names += [] if part in names else [part]
            else:
                exact = re.escape(self._known.get(part, part))
                pattern += _NUMBER.sub(r"[+-]?\\d[\\d,.]*", exact) if any_number else exact
        came = came.strip()
        for port, free in self.ports.items():
            came = came.replace(str(free), port)
        found = re.fullmatch(pattern, came, re.DOTALL)
        assert found, f"{where}\n--- the page shows\n{shown}\n--- it printed\n{came}"
        self._known.update({name: found[f"id_{name}"] for name in names})


def _free_ports(count: int) -> Sequence[int]:
    opened = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in opened]
    for each in opened:
        each.close()
    return ports
