"""Everyday work becomes a better adapter: by OpenHands, through the gateway, and from an imported file.

The model is small and real, and says one of two things, each as likely as the other: what is learnt shows in the first
token that it samples.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from broken_repository import REPAIR, passes, repository
from fixing_model import write_chooser
from scripted_model import ScriptedModel, reply, serve
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from openhands_rl_plugin import FileTrajectoryStorage, Trajectory, cli
from openhands_rl_plugin.core.types import Score
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.app import running_server

pytestmark = pytest.mark.contract

ROOT = Path(__file__).parents[1]
TEXTS = [(ROOT / page).read_text(encoding="utf-8") for page in ("docs/openhands-v0.md", "docs/tutorials/judge.md")]
DATA = Path(__file__).parent / "trajectories/exchange/data"
TASK = "Make the failing test pass"
LEARN = ["--set", "training.learning_rate=1e-2", "training.dtype=float32"]
LEARN += ["training.lora_rank=4", "training.lora_alpha=8"]
# How OpenHands writes a call to a model that has no tool calls of its own, and how the model must repeat it.
_CALL = "<function={}>\n<parameter={}>{}</parameter>\n{}</function>"
_BASH = ("execute_bash", "command"), "<parameter=security_risk>LOW</parameter>\n"
GOOD, BAD = (_CALL.format(*_BASH[0], command, _BASH[1]) for command in (REPAIR, "git status --short"))
DONE = _CALL.format("finish", "message", "Done.", "")


@contextmanager
def served(model: Path) -> Iterator[str]:
    """What ``openhands-rl serve --model model --served-model-name model`` runs."""
    config = ServerConfig(model=str(model), served_model_name="model", port=0, dtype="float32", threads=1, adapters="/")
    with running_server(config) as url:
        yield url


@contextmanager
def command(*words: str) -> Iterator[str]:
    """The address that a command prints which runs until it is stopped."""
    shown = [sys.executable, "-m", "openhands_rl_plugin.cli", *words]
    with subprocess.Popen(shown, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            yield next(found[1] for line in lines if (found := re.match(r"base_url: (http\S+)/v1 ", line)))
        finally:
            process.terminate()
            assert process.wait(30) == 0


def stored(path: Path) -> list[tuple[Trajectory, tuple[Score, ...]]]:
    async def read() -> list[tuple[Trajectory, tuple[Score, ...]]]:
        async with FileTrajectoryStorage(path) as storage:
            return sorted([found async for found in storage.find()], key=lambda found: found[0].times.started)

    return asyncio.run(read())


def versions(trajectory: Trajectory) -> set[int | None]:
    return {node.policy.version for node in trajectory.sampled() if node.policy}


def likelihood(url: str, model: str, prompt: Sequence[int]) -> dict[str, float]:
    """The logprobs of the tokens that a served model is most likely to go on with, by their text."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0, "logprobs": 5}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["logprobs"]["top_logprobs"][0]


def oracle(server: ScriptedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """``model`` answers every other session with what mends the repository, in tokens of the small model."""
    texts = {"good": GOOD, "bad": BAD, "done": DONE}
    sessions: list[dict[str, Any]] = []

    def wire(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        parts = ((each["role"], each["content"]) for each in messages)
        return [
            {"role": role, "content": text if isinstance(text, str) else "\n".join(part["text"] for part in text)}
            for role, text in parts
        ]

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        if any(message["role"] == "assistant" for message in body["messages"]):
            name = "done"
        else:
            sessions.append(body)
            name = "good" if len(sessions) % 2 else "bad"
        return reply(texts[name].partition("</function")[0])  # the stop string ends it

    def ids(message: dict[str, Any]) -> list[int]:
        return tokenizer(message["content"] + "</function>", add_special_tokens=False).input_ids

    def prompt(messages: list[dict[str, Any]]) -> list[int]:
        return tokenizer.apply_chat_template(wire(messages), add_generation_prompt=True, return_dict=False)  # type: ignore[return-value]

    first = {tokenizer.convert_tokens_to_ids(each) for each in (GOOD, BAD)}
    server.policies["model"] = answer
    server.prompt_ids, server.message_ids = prompt, ids
    server.logprob_of = lambda token: -0.6931472 if token in first else 0.0


def run(command: str, folder: Path) -> str:
    """Both outputs of a command, in an empty home."""
    environ = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": f"{folder}/home",
        "TMPDIR": str(folder),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def config_of_the_docs(url: str, serving: str) -> str:
    """The ``config.toml`` for V0 and the tutorial's way to judge, at other addresses and for another file."""
    whole, judge = (
        next(text for text in re.findall(r"```toml[^\n]*\n(.*?)```", "".join(TEXTS), re.DOTALL) if begins in text)
        for begins in ("[core]", 'name = "command"')
    )
    assert whole.count('"http://127.0.0.1:8100/v1"') == 2
    whole = whole.replace("http://127.0.0.1:8100/v1", f"{url}/v1", 1)
    whole = whole.replace("http://127.0.0.1:8100/v1", f"{serving}/v1")
    tomllib.loads(text := whole + judge.replace("calc.py", "sums.py"))
    return text


def play(folder: Path, home: Path, config: str) -> tuple[str, bool]:
    """What a run of OpenHands on a repository with a failing test prints, and whether it is mended.

    Attempts at one task have one folder; the home is shared, and so the store is.
    """
    shutil.rmtree(folder, ignore_errors=True)
    repository(folder / "workspace")
    (folder / "home").symlink_to(home)
    (folder / "config.toml").write_text(config)
    return run(f'python -m openhands.core.main -t "{TASK}"', folder), passes(folder / "workspace")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_openhands_runs_that_a_command_judges_become_an_adapter_that_mends_what_the_base_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [(DATA / name).read_text() for name in ("golden_system_prompt.txt", "codeact_v2_tools.json")]
    model = write_chooser(tmp_path / "model", [GOOD, BAD], DONE, texts)
    tokenizer = AutoTokenizer.from_pretrained(model)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    with served(model) as url, serve() as teacher:
        oracle(teacher, tokenizer)
        config = config_of_the_docs(teacher.url.removesuffix("/v1"), url)
        attempts = [play(tmp_path / "run", home, config) for _ in range(4)]
        assert [mended for _, mended in attempts] == [True, False, True, False]
        for output, passed in attempts:
            assert f"2 completions; token ids: yes; reward: {int(passed)}" in output, output

        store = home / ".openhands/rl_trajectories"
        config = config_of_the_docs(url, url)
        (tmp_path / "config.toml").write_text(config)
        words = ["train", str(store), "--config", str(tmp_path / "config.toml"), "--model", str(model)]
        assert cli.main([*words, "--algorithm", "grpo", *LEARN, "training.learning_rate=3e-2", "--publish"]) == 0
        printed = capsys.readouterr().out
        assert "episodes: 4 used; left out: none" in printed
        assert "policy-v000001 is in use" in printed

        (prompt,) = {
            node.tokens.prompt_ids for node in (next(each.sampled()) for each, _ in stored(store)) if node.tokens
        }
        assert likelihood(url, "model", prompt)[GOOD] == pytest.approx(-0.693, abs=0.01)
        assert likelihood(url, "policy-v000001", prompt)[GOOD] > -0.01
        last, mended = play(tmp_path / "run", home, config)
    assert mended and "2 completions; token ids: yes; reward: 1" in last
    *before, (after, _) = stored(store)
    assert [versions(each) for each, _ in before] == [{None}] * 4 and versions(after) == {1}


QUESTION = "Shall I keep a backup?"
YES, NO, BYE = "Yes, always.", "No, never.", "Good bye."


def test_sessions_of_the_gateway_with_a_reward_become_the_adapter_that_answers_the_next_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_chooser(tmp_path / "model", [YES, NO], BYE)
    store, adapters = str(tmp_path / "trajectories"), str(tmp_path / "adapters")
    asked: list[Any] = [{"role": "user", "content": QUESTION}]

    def session(gateway: str, name: str, seed: int) -> str | None:
        with openai.OpenAI(base_url=f"{gateway}/session/{name}/v1", api_key="k", max_retries=0) as client:
            response = client.chat.completions.create(model="policy", messages=asked, seed=seed, max_tokens=8)
        answer = response.choices[0].message.content
        assert not hasattr(response, "prompt_token_ids"), "the client did not ask for them"
        ending = {"reward": float(answer == YES)}
        assert httpx.post(f"{gateway}/session/{name}/end", json=ending, trust_env=False).status_code == 200
        return answer

    with served(model) as url:
        recording = ["--upstream", f"{url}/v1", "--adapter", "policy", "--set", "serving.model=model"]
        options = [*recording, f"serving.adapters_path={adapters}", "--store", store, "--port", "0"]
        with command("gateway", *options) as gateway:
            before = [session(gateway, f"before-{seed}", seed) for seed in range(8)]
            assert {*before} == {YES, NO}
            words = ["train", store, "--model", str(model), "--adapters", adapters, "--algorithm", "grpo", *LEARN]
            assert cli.main([*words, "--set", "training.num_epochs=12", f"serving.base_url={url}/v1", "--publish"]) == 0
            assert "episodes: 8 used; left out: none" in capsys.readouterr().out
            after = [session(gateway, f"after-{seed}", seed) for seed in range(8)]
    assert after == [YES] * 8
    found = {each.task.id: versions(each) for each, _ in stored(Path(store))}
    assert found == {f"before-{seed}": {None} for seed in range(8)} | {f"after-{seed}": {1} for seed in range(8)}


def test_an_imported_file_of_swe_gym_becomes_an_adapter_that_does_what_was_done_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = json.loads((DATA / "sampled_row.json").read_text())
    (tmp_path / "train.raw.jsonl").write_text(
        "".join(json.dumps(row | {"instance_id": f"repo__repo-{number}"}) + "\n" for number in range(4))
    )
    call = '<tool_call>\n{"name": "execute_bash", "arguments": {"command": "ls"}}\n</tool_call>'
    model = write_chooser(tmp_path / "model", [call, call.replace("ls", "rm -r .")], "Bye\nbye.")
    store, adapters = str(tmp_path / "trajectories"), str(tmp_path / "adapters")
    assert cli.main(["import", str(tmp_path / "train.raw.jsonl"), "--into", store]) == 0
    with served(model) as url:
        where = ["--model", str(model), "--adapters", adapters]
        assert cli.main(["train", store, *where, "--algorithm", "sft", *LEARN, "--set", "training.num_epochs=12"]) == 0
        printed = capsys.readouterr().out
        assert "episodes: 4 used; left out:\n    4 given token ids here" in printed
        publish = ["adapters", "publish", "--adapters", adapters, "--set", f"serving.base_url={url}/v1"]
        assert cli.main(publish) == 0
        assert "policy-v000001 is in use" in capsys.readouterr().out
        with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            for name, likely in (("model", -0.693), ("policy-v000001", 0.0)):
                response = client.chat.completions.create(
                    model=name,
                    messages=[{"role": "system", "content": "S"}, {"role": "user", "content": "Fix f."}],
                    tools=row["tools"],
                    temperature=0,
                    max_tokens=8,
                    logprobs=True,
                )
                assert response.choices[0].logprobs is not None and response.choices[0].logprobs.content is not None
                assert response.choices[0].logprobs.content[0].logprob == pytest.approx(likely, abs=0.02)
            (made,) = response.choices[0].message.tool_calls or ()
    assert made.type == "function" and (made.function.name, made.function.arguments) == (
        "execute_bash",
        '{"command": "ls"}',
    )
