"""Keys in settings, variables, URLs, prompts and what servers echo: no command prints or writes any of them."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest

from openhands_rl_plugin import cli
from openhands_rl_plugin.evals.runs.plan import KEY_VARIABLE

_LETTERS = "Zq7Lw3Xn9Vb5Kd1Rt8"
KEYS = {
    place: f"{prefix}{number}{_LETTERS[number:]}{_LETTERS[:number]}{number}Hs4Gy6"
    for number, (place, prefix) in enumerate(
        {
            "OPENHANDS_RL_API_KEY": "orl-",
            "OPENAI_API_KEY": "sk-proj-",
            "HF_TOKEN": "hf_",
            "MY_SERVER_KEY": "",
            "llm.api_key": "sk-",
            "url of a server": "pw",
            "url of an environment": "pw",
            "prompt": "sk-ant-api03-",
        }.items()
    )
}


class Echo(BaseHTTPRequestHandler):
    """Refuses everything, and says in its error what it was sent, as badly configured servers do."""

    def do_GET(self) -> None:
        sent = self.rfile.read(int(self.headers.get("content-length") or 0)).decode(errors="replace")
        text = f"401 for {self.path} with {dict(self.headers)} and {sent}; every key: {' '.join(KEYS.values())}"
        body = json.dumps({"error": {"message": text}, "detail": text}).encode()
        self.send_response(401, "Bad key")
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_DELETE = do_GET

    def log_message(self, format: str, *args: object) -> None:
        return None


@contextmanager
def echo() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


CONFIG = """
[llm]
api_key = "{key}"
[llm.eval]
model = "openai/planted"
base_url = "http://deploy:{server}@127.0.0.1:{port}/v1"
api_key = "{key}"
[rl]
env_name = "webshop"
env_server_base = "http://deploy:{environment}@127.0.0.1:{port}"
[rl.serving]
base_url = "http://deploy:{server}@127.0.0.1:{port}/v1"
model = "planted"
api_key_env = "MY_SERVER_KEY"
adapters_path = "adapters"
[rl.storage]
path = "store"
"""


def commands(port: int, folder: Path) -> dict[str, list[list[str]]]:
    """Every command, so that it reads the keys and meets the server that echoes them."""
    url = f"http://deploy:{KEYS['url of a server']}@127.0.0.1:{port}/v1"
    config, rows, store = str(folder / "config.toml"), str(folder / "rows.jsonl"), str(folder / "store")
    configured, model = ["--config", config], ["--base-url", url, "--model", "planted"]
    mongodb = f"mongodb://deploy:{KEYS['url of a server']}@127.0.0.1:{port}/rl?serverSelectionTimeoutMS=300"
    play = [*configured, "--llm", "eval"]
    return {
        "adapters": [["adapters", what, *configured] for what in ("list", "publish", "rollback")],
        "chat": [["chat", *model], ["chat", *model, "--record", mongodb]],
        "demo": [["demo", "--model", url, "--run-dir", str(folder / "demo")]],
        "doctor": [["doctor", *configured], ["doctor", *configured, "--show"], ["doctor", "drift", mongodb]],
        "env": [["env", "webshop", "--host", url, "--port", "0"]],
        "evaluate": [
            ["evaluate", rows, *play, "--out", str(folder / "out")],
            ["evaluate", "environment", *play, "--agent", "RLAgent", "--tasks", "2", "--out", str(folder / "out2")],
            ["evaluate", rows, *model, "--out", str(folder / "out3")],
            ["evaluate", "--compare", rows, url],
            ["evaluate", "--report", rows, "--store", mongodb],
        ],
        "export": [
            ["export", each, "--format", "sft", "--out", str(folder / "sft.jsonl")] for each in (store, mongodb)
        ],
        "gateway": [["gateway", "--upstream", url, "--store", mongodb, "--port", "0"]],
        "grade": [["grade", rows, "--instances", rows, "--out", str(folder / "graded"), "--mirror", url]],
        "import": [["import", rows, "--into", store], ["import", rows, "--into", mongodb]],
        "improve": [["improve", "--repo", str(folder), *configured, "--run-dir", str(folder / "improve")]],
        "list": [["list", store], ["list", store, "--by"], ["list", mongodb], ["list", "OPENAI_API_KEY"]],
        "loop": [["loop", "environment", *configured, "--tasks", "4", "--run-dir", str(folder / "loop")]],
        "rollouts": [
            ["rollouts", "serve", *model, "--listen", url, "--store", str(folder / "queue")],
            ["rollouts", "serve", *configured, "--api-key-env", KEYS["prompt"], "--port", "0"],
        ],
        "run": [
            ["run", "-t", KEYS["prompt"], *configured],
            ["run", "-t", "Think.", *configured, *model, "--workspace", config],
            ["run", "-t", "Think.", *configured, "--set", f"serving.api_key_env={KEYS['prompt']}"],
        ],
        "score": [
            ["score", store, "--reward", "matching", "--set", f"api_key={KEYS['prompt']}"],
            ["score", mongodb, "--reward", "return"],
        ],
        "serve": [
            ["serve", "--model", "planted", "--host", url],
            ["serve", "--base-url", url, "--model", "planted", "--tools", url, "--port", "0"],
        ],
        "show": [["show", store, "x"], ["show", mongodb, "x"]],
        "studio": [["studio", rows], ["studio", mongodb], ["studio", store, "--host", url]],
        "tasks": [["tasks", "check", rows], ["tasks", "make", url, "--out", str(folder / "t")]],
        "train": [["train", store, "--model", url, *configured], ["train", mongodb, "--model", "planted", *configured]],
        "watch": [["watch", *configured], ["watch", "status", *configured]],
    }


def forms(key: str) -> set[str]:
    """A key as it may stand in a log."""
    return {
        key,
        quote(key, safe=""),
        base64.b64encode(key.encode()).decode().rstrip("="),
        base64.b64encode(f"deploy:{key}".encode()).decode().rstrip("="),
    }


def found_in(text: str) -> list[str]:
    return [place for place, key in KEYS.items() if any(form in text for form in forms(key))]


def test_every_command_is_walked() -> None:
    assert commands(1, Path()).keys() == cli.commands().keys()


@pytest.mark.parametrize("command", cli.commands())
@pytest.mark.timeout(120)
def test_no_key_is_printed_or_written(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``OPENHANDS_RL_DEBUG``, which prints tracebacks beside all that is printed without it."""
    for name, key in KEYS.items():
        if name.isupper():
            monkeypatch.setenv(name, key)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(cli.DEBUG, "1")
    monkeypatch.setenv(KEY_VARIABLE, "")  # `evaluate` puts the key of the configuration there
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with echo() as port:
        given = {"key": KEYS["llm.api_key"], "server": KEYS["url of a server"], "port": port}
        (tmp_path / "config.toml").write_text(CONFIG.format(environment=KEYS["url of an environment"], **given))
        row = {
            "instance_id": "a__b-1",
            "repo": "a/b",
            "base_commit": "c",
            "version": "1",
            "patch": "",
            "test_patch": "",
        }
        asked = f"Use OPENAI_API_KEY={KEYS['prompt']} and http://deploy:{KEYS['url of a server']}@127.0.0.1/x"
        row |= {"problem_statement": asked, "FAIL_TO_PASS": "[]", "PASS_TO_PASS": "[]"}
        row |= {"model_name_or_path": "m", "model_patch": f"+{KEYS['prompt']}"}
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        own = {tmp_path / "config.toml", tmp_path / "rows.jsonl"}
        for words in commands(port, tmp_path)[command]:
            cli.main(words)
            printed = capfd.readouterr()
            assert "unrecognized arguments" not in printed.err and "are required" not in printed.err
            assert found_in(printed.out) == [] and found_in(printed.err) == [], (words[:2], printed)
    files = [file for file in tmp_path.rglob("*") if file.is_file() and file not in own]
    assert {str(file): found for file in files if (found := found_in(file.read_text(errors="replace")))} == {}
