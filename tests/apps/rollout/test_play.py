"""One episode against an endpoint: the shop and a repair task through the installed OpenHands, and what fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from needs import needs_bubblewrap, needs_contrib
from scripted_model import ScriptedModel, reply, serve, with_prompt_ids
from small_shop import running_shop

from evaluation.performance.hosts.instant_model import instant_model, script
from openhands_rl_plugin import FileTrajectoryStorage, PlayOptions, PolicyRef, Task, play
from openhands_rl_plugin.apps.rollout.play import find_task
from openhands_rl_plugin.apps.rollout.rollout import PlayedRollout
from openhands_rl_plugin.cli import rollout
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import FailureKind, StopReason
from openhands_rl_plugin.evals.swe.instances import row_of

pytestmark = pytest.mark.contract

SEARCH = "Thought:\nI look.\n\nAction:\nsearch[socks]"


@pytest.fixture(scope="module")
def model() -> Iterator[ScriptedModel]:
    with serve() as server:
        server.context = 4096
        server.policies |= {"base": lambda _: reply(SEARCH), "trl-policy-v3": lambda _: reply(SEARCH)}
        server.policies["blind"] = lambda _: with_prompt_ids(reply(SEARCH), None)
        server.scripts["base"].clear()
        server.adapters["trl-policy-v3"] = "base"
        yield server


@pytest.fixture
def store(tmp_path: Path) -> FileTrajectoryStorage:
    return FileTrajectoryStorage(tmp_path / "store", durable=False)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The configuration that names a shop that is served."""
    file = tmp_path_factory.mktemp("shop") / "config.toml"
    with running_shop() as url:
        file.write_text(f'[rl]\nenv_name = "webshop"\nenv_server_base = "{url}"\n')
        yield file


Options = Callable[..., PlayOptions]


@pytest.fixture
def options(model: ScriptedModel, shop: Path) -> Options:
    def given(name: str = "base", **more: object) -> PlayOptions:
        fields = {"base_url": model.url, "model": name, "max_turns": 2, "config": shop}
        return PlayOptions.model_validate({**fields, **more})

    return given


async def test_an_episode_of_the_shop(options: Options, store: FileTrajectoryStorage):
    result = await play("webshop-3", options("trl-policy-v3"), storage=store)
    assert (result.reward, result.failure, result.turns, result.cut_short) == (0.0, None, 2, True)
    assert result.policy == PolicyRef(base_model="base", adapter="trl-policy", version=3)
    assert result.policy.served_name == "trl-policy-v3" and not result.off_policy
    (segment,) = result.segments
    sampled = [*SEARCH.encode(), 260]
    assert [each for each, own in zip(segment.input_ids, segment.mask, strict=True) if own] == sampled * 2
    assert {each for each, own in zip(segment.logprobs, segment.mask, strict=True) if own} == {-0.5}
    assert segment.policy == result.policy
    assert PlayedRollout.model_validate_json(result.model_dump_json()) == result
    (kept,) = [trajectory async for trajectory, _ in store.find()]
    assert kept.id == result.trajectory_id and kept.messages() == result.messages


async def test_an_episode_with_a_name_is_rolled_out_once(
    model: ScriptedModel, options: Options, store: FileTrajectoryStorage
):
    named = {"run_id": "step-7", "group_id": "webshop-3"}
    before = len(model.requests["base"])
    first = await play("webshop-3", options(**named), storage=store)
    again = await play("webshop-3", options(**named), storage=store)
    other = await play("webshop-3", options(**named, sample=1), storage=store)
    assert again == first and other.trajectory_id != first.trajectory_id and other.group_id == first.group_id
    sent = model.requests["base"][before:]
    assert len(sent) == 4 and sent[0]["seed"] != sent[2]["seed"]
    await play("webshop-3", options(**named | {"group_id": "webshop-3 again"}), storage=store)
    seeds = [each["seed"] for each in model.requests["base"][before:]]
    assert len(seeds) == len(set(seeds)) == 6, "a trainer's next epoch is not sampled like this one"


async def test_no_token_ids(model: ScriptedModel, options: Options, store: FileTrajectoryStorage):
    """An endpoint that has none is a failed episode, unless it is set to record them itself."""
    model.scripts["blind"].clear()
    failed = await play("webshop-3", options("blind"), storage=store)
    assert failed.failure is not None and (failed.failure.kind, failed.reward) == (FailureKind.MODEL, None)
    assert "no token ids were recorded" in failed.failure.message and not failed.segments
    recorded = await play("webshop-3", options("blind", token_ids=False), storage=store)
    assert (recorded.failure, recorded.reward, recorded.segments) == (None, 0.0, ())


@needs_contrib
@needs_bubblewrap
async def test_a_repair_task_ends_with_its_tests(store: FileTrajectoryStorage):
    from openhands_rl_plugin.contrib.repair.rows import repair_instances

    instance = repair_instances(1, "heldout")[0]
    mend = f"git apply <<'EOF'\n{instance.patch}\nEOF"
    answers = script([{"bash": mend}, {"finish": "done"}])
    row = row_of(instance.model_copy(update={"problem_statement": answers}))
    with instant_model() as url:
        asked = PlayOptions(base_url=url, model="instant", max_turns=6)
        result = await play(row, asked, storage=store)
    assert result.failure is None, result.failure
    assert (result.reward, result.reward_version, result.resolved) == (1.0, "tests-1", True)
    assert result.stop is StopReason.TERMINATED and len(result.segments) == 1 and sum(result.segments[0].mask) > 0


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    """The kind of failure, and its one line."""
    assert rollout.main(list(words)) == 3
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    found = json.loads(line)
    assert found["reward"] is None and found["segments"] == []
    assert err == f"error: {found['failure']['message']}\n"
    return found["failure"]["kind"], found["failure"]["message"]


def test_the_command_prints_one_object_and_one_line_for_bad_input(
    model: ScriptedModel, shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    there = ["--base-url", model.url, "--model", "base"]
    for words, kind, expected in (
        (["3", "--base-url", "http://127.0.0.1:1/v1", "--model", "base"], "infrastructure", "no model server"),
        (["3"], "configuration", "give --base-url URL and --model NAME"),
        (["sdist__Unidecode-1.4.0-edf4db8", *there], "configuration", "swe-local has no task sdist__Unidecode-1.4.0"),
    ):
        found = refused(capsys, "--task", *words)
        assert found[0] == kind and expected in found[1], found
    words = ["--task", "webshop-3", *there, "--config", str(shop), "--max-turns", "1"]
    assert rollout.main([*words, "--store", str(tmp_path / "store")]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert PlayedRollout.model_validate_json(line).task_id == "webshop-3"


def test_what_a_task_is(tmp_path: Path):
    own = RLSettings(env_name="gymnasium/Walk-v0")
    assert find_task("7", "", own).entry.task.data == {"idx": 7}
    assert find_task("gymnasium__Walk-v0-7", "", own).entry.task.id == "gymnasium__Walk-v0-7"
    assert find_task("webshop-3", "webshop", own).settings.env_name == "webshop"
    task = Task(id="x", environment="gymnasium/FrozenLake-v1", data={"idx": 2})
    assert find_task(task, "", own).settings.env_name == task.environment
    assert find_task(task.model_dump(mode="json"), "", own).entry.task == task
    local = find_task("sdist__Unidecode-1.4.0-edf4db8e", "", own)
    assert local.suite.software and local.entry.task.split in ("train", "heldout")
    again = find_task(local.entry.task, "", own)
    assert again.entry.instance == local.entry.instance
    assert find_task(local.entry.row, "", own).entry.instance == local.entry.instance
    file = tmp_path / "tasks.jsonl"
    file.write_text(f'{{"id": "y", "environment": "webshop"}}\n{task.model_dump_json()}\n{{"id": 3}}\n')
    assert find_task("x", str(file), own).entry.task == task
    with pytest.raises(ConfigError, match=r"or id and environment: Task\.id"):
        find_task({"id": 3, "environment": "webshop"}, "", own)
