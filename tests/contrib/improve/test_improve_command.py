"""``openhands-rl improve``: what is refused before anything is made, what a run keeps, and the price of it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from broken_repository import commit, gym_repository, units_repository
from fixing_model import write_chooser
from needs import needs_bubblewrap
from tiny_model import write_model, write_tokenizer

from openhands_rl_plugin import cli
from openhands_rl_plugin.apps.loop.checks import claim
from openhands_rl_plugin.config.host import TOOLS, host_of
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.contrib.improve.gym import Gym, WantedTasks
from openhands_rl_plugin.contrib.improve.price import context_of, fitted, native_calls
from openhands_rl_plugin.core.records import HELD_OUT
from openhands_rl_plugin.evals.swe.instances import Instance, read_instances, row_of
from openhands_rl_plugin.evals.tasks.source import find_source
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.app import running_server

MODEL = "reader"
_TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / MODEL
    write_model(folder, num_hidden_layers=1, max_position_embeddings=8192)
    write_tokenizer(folder, _TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[str]:
    config = ServerConfig(model=str(model), served_model_name=MODEL, port=0, dtype="float32", threads=1, adapters="/")
    with running_server(config) as url:
        yield url


def words(repository: Path, folder: Path, *more: str) -> list[str]:
    return ["improve", "--repo", str(repository), "--run-dir", str(folder / "run"), *more]


def config(folder: Path, server: str, more: str = "") -> Path:
    file = folder / "config.toml"
    file.write_text(f"""
[rl]
max_turns = 3
max_prompt_length = 7000
max_response_length = 256
max_workers = 2
{more}
[rl.storage]
path = "{folder / "trajectories"}"
[rl.loop]
iterations = 2
tasks_per_iteration = 4
samples_per_task = 3
[rl.serving]
base_url = "{server}/v1"
adapters_path = "{folder / "adapters"}"
""")
    return file


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


def made_gym(folder: Path, repository: Path) -> None:
    """The tasks of an earlier run, as it left them."""
    source = find_source(str(repository), "HEAD", folder)
    (folder / "tasks").mkdir(parents=True)
    (folder / "tasks/source.json").write_text(source.model_dump_json())
    wanted = WantedTasks(tasks=32, held_out=16).model_dump(mode="json")
    claim(folder / "tasks", {"repository": source.git, **wanted})
    instance = Instance(instance_id="a", repo="git/gym", base_commit="0" * 40, problem_statement="It is wrong. " * 20)
    rows = [
        instance.model_copy(update={"instance_id": f"{part}-{at}", "extra": {"split": part}})
        for part in ("train", HELD_OUT)
        for at in range(4)
    ]
    (folder / "tasks/gym.jsonl").write_text("".join(json.dumps(row_of(each)) + "\n" for each in rows))
    gym = Gym(
        rows="gym.jsonl",
        counts=(4, 4),
        fixes=(1, 1),
        files=(2, 2),
        dropped={"its tests come out differently from run to run": 4},
        grading=2.0,
        longest=instance.problem_statement,
    )
    (folder / "tasks/gym.json").write_text(gym.model_dump_json())


def test_what_is_no_gym_is_refused_in_one_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, empty = tmp_path / "plain", tmp_path / "empty"
    plain.mkdir()
    subprocess.run(["git", "init", "--quiet", str(empty)], check=True)
    units = units_repository(tmp_path / "units")
    for repository, more, expected in (
        (tmp_path / "nowhere", [], "is no folder of a git repository"),
        (empty, [], "has no commit HEAD"),
        (units, ["--commit", "v9"], "has no commit v9"),
        (units, ["--model", str(plain)], "this is not the folder of a model"),
        (units, ["--model", str(model), "--held-out", "1"], "--held-out: must be greater than or equal to 4"),
    ):
        assert cli.main(words(repository, tmp_path, *more)) == (2 if "must be" in expected else 1)
        assert expected in error_of(capsys)
    assert not (tmp_path / "run/tasks").exists(), "nothing is begun"


def test_prompt_and_lengths_follow_from_the_context(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 32768}}')
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ tools }}"}')
    assert [context_of(tmp_path, served) for served in (None, 8192)] == [32_768, 8192]
    assert native_calls(tmp_path, 32_768) and not native_calls(tmp_path, 8192)
    short, long = (fitted(RLSettings(), each, chosen=False) for each in (8192, 1_000_000))
    assert (short.workspace.is_compact, short.max_response_length, short.max_prompt_length) == (True, 512, 7680)
    assert not long.workspace.is_compact and long.max_prompt_length < 65_536


def test_a_dry_run_shows_the_price_and_existing_tasks_are_kept(
    server: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = gym_repository(tmp_path / "gym")
    made_gym(tmp_path / "run", repository)
    given = ["--config", str(config(tmp_path, server)), "--dry-run"]
    assert cli.main(words(repository, tmp_path, *given)) == 0
    printed = capsys.readouterr().out
    assert "4 to train on (1 past fixes; they change 2 files), 4 held out" in printed
    assert "dropped: 4: its tests come out differently" in printed
    assert "prompt: compact; tool calls in the text" in printed
    assert "24 to train on, 8 to evaluate" in printed and f"{32 * 7000:,} read" in printed

    commit(repository, "later", shapes=(repository / "shapes.py").read_text() + "\n\nPI = 3\n")
    assert cli.main(words(repository, tmp_path, *given)) == 0
    assert "is there by now: --fresh makes tasks of that" in capsys.readouterr().out
    assert not (tmp_path / "run/state.json").exists() and not (tmp_path / "trajectories").exists()

    given[1] = str(config(tmp_path, server, 'rollout_strategy = "StandardReAct"\nmax_obs_length = 100'))
    (tmp_path / "config.toml").write_text((tmp_path / "config.toml").read_text().replace("7000", "8000"))
    assert cli.main(words(repository, tmp_path, *given)) == 1
    assert "are 8,256 tokens, and the model reads 8,192" in error_of(capsys)

    (tmp_path / "run/tasks/gym.json").write_text("{")
    assert cli.main(words(repository, tmp_path, "--config", str(config(tmp_path, server)), "--dry-run")) == 1
    assert "gym.json cannot be read" in error_of(capsys)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_bubblewrap
def test_what_is_learnt_is_published_and_its_use_is_printed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a model that begins with the fix of one of the training tasks, so that some of its attempts succeed."""
    repository = gym_repository(tmp_path / "gym")
    sizes = ["loop.iterations=1", "loop.tasks_per_iteration=2", "loop.samples_per_task=6"]
    run = words(repository, tmp_path, "--tasks", "4", "--held-out", "4", "--set", *sizes)
    run += ["--processes", "0", "--timeout", "120"]
    assert cli.main([*run, "--model", str(model), "--dry-run"]) == 0
    shell = TOOLS[host_of(RLSettings())].shell
    fixes = [
        _call(shell, command=f"cd /workspace/git__* && git apply <<'E'\n{each.patch}\nE")
        for each in read_instances(tmp_path / "run/tasks/gym.jsonl")
    ]
    fixer = write_chooser(tmp_path / "fixer", fixes, _call("finish", message="done"))
    capsys.readouterr()
    assert cli.main([*run, "--model", str(fixer)]) == 0
    printed = capsys.readouterr().out
    (version,) = AdapterStore(tmp_path / "run/adapters").versions("gym")
    assert f"adapter: {version.name} in {tmp_path / 'run/adapters'}" in printed
    assert f"openhands-rl serve --model {fixer} --port 8100" in printed
    assert "12 to train on" in printed
    current = AdapterStore(tmp_path / "run/adapters").current("gym")
    assert current is not None and current.name == version.name, "it was in use on the server of the run"


def _call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
