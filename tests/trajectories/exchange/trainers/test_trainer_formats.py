"""Training sequences in the formats of other trainers, and back: nothing is lost, and what would be is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from openhands_rl_plugin.core.types import Failure, FailureKind, PolicyRef, Sample, StopReason, StrategySpec
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError
from openhands_rl_plugin.trajectories.exchange.trainers import openenv, openrlhf, skyrl, tinker, trl, verl
from openhands_rl_plugin.trajectories.exchange.trainers.rollout import PlayedRollout

POLICY = PolicyRef(base_model="base", adapter="trl-policy", version=3)
IDS = some.lists(some.integers(0, 2**31 - 1), min_size=1, max_size=5)
LOGPROB = some.floats(-30, 0, width=32)
TURN = some.tuples(IDS, some.lists(some.tuples(some.integers(0, 2**31 - 1), LOGPROB), min_size=1, max_size=5))


def sample_of(turns: list[Any], advantage: float, leaf: int = 0) -> Sample:
    """Prompts and answers, one after another."""
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    spans: list[tuple[int, int, int]] = []
    for number, (prompt, answer) in enumerate(turns):
        spans.append((number, len(ids) + len(prompt), len(ids) + len(prompt) + len(answer)))
        ids += [*prompt, *(token for token, _ in answer)]
        mask += [*[False] * len(prompt), *[True] * len(answer)]
        logprobs += [*[0.0] * len(prompt), *(value for _, value in answer)]
    return Sample(
        trajectory_id="t",
        leaf=leaf,
        input_ids=tuple(ids),
        mask=tuple(mask),
        logprobs=tuple(logprobs),
        advantage=advantage,
        policy=POLICY,
        spans=tuple(spans),
    )


SAMPLE = some.builds(sample_of, some.lists(TURN, min_size=1, max_size=4), some.floats(-4, 4, width=32))
SEGMENTS = some.lists(some.lists(TURN, min_size=1, max_size=3), min_size=1, max_size=3).map(
    lambda all_turns: [sample_of(turns, 0.5) for turns in all_turns]
)
ONE = sample_of([([1, 2], [(3, -0.5), (4, -0.25)]), ([5], [(6, -1.0)])], 0.5)


def played(*segments: Sample, **more: object) -> PlayedRollout:
    given = {"trajectory_id": "t", "run_id": "r", "group_id": "g", "task_id": "task", "environment": "webshop"}
    own = {"strategy": StrategySpec(name="StandardReAct"), "policy": POLICY, "stop": StopReason.TERMINATED}
    return PlayedRollout.model_validate({**given, **own, "reward": 1.0, "segments": segments, "turns": 2, **more})


def same(found: list[Sample], sent: list[Sample], *names: str) -> bool:
    wanted = ("input_ids", "mask", "logprobs", *names)
    assert [[getattr(each, name) for name in wanted] for each in found] == [
        [getattr(each, name) for name in wanted] for each in sent
    ]
    return True


def as_json(value: Any) -> Any:
    """Rows are plain values: they survive a file."""
    return json.loads(json.dumps(value))


@given(SEGMENTS)
def test_tinker(sent: list[Sample]):
    rows = tinker.datums(sent, weights=True)
    for row, sample in zip(rows, sent, strict=True):
        sizes = {len(row["model_input"]), *map(len, row["loss_fn_inputs"].values())}
        assert sizes == {len(sample.input_ids) - 1}
        assert sum(row["loss_fn_inputs"]["advantages"]) == pytest.approx(0.5 * sum(sample.mask))
    assert same(tinker.samples_of_datums(as_json(rows)), sent, "advantage")


@given(SAMPLE, some.floats(0.01, 1))
def test_tinker_has_an_advantage_for_each_token(sample: Sample, scale: float):
    own = tuple(float(at) if on else 0.0 for at, on in enumerate(sample.mask))
    sent = sample.model_copy(update={"token_advantages": own, "advantage": 1.0})
    (row,) = tinker.datums([sent], scale=scale)
    assert row["loss_fn_inputs"]["advantages"] == [each * scale for each in own[1:]] and "weights" not in row
    (found,) = tinker.samples_of_datums(tinker.datums([sent], weights=True))
    assert [found.advantage_at(at) for at, on in enumerate(found.mask) if on] == [
        own[at] for at in range(len(own)) if own[at]
    ]
    with pytest.raises(ExchangeError, match="without weights"):
        tinker.samples_of_datums([row])


@given(SEGMENTS)
def test_skyrl(sent: list[Sample]):
    columns = skyrl.generator_columns([played(*sent), played(ONE)], ["a", "b"], step_wise=True)
    assert columns["rewards"] == [*[0.0] * (len(sent) - 1), 1.0, 1.0]
    assert columns["is_last_step"] == [*[False] * (len(sent) - 1), True, True]
    assert columns["trajectory_ids"] == [*["a"] * len(sent), "b"]
    assert same(skyrl.samples_of_columns(as_json(columns)), [*sent, ONE])


def test_skyrl_has_no_row_of_an_episode_that_failed():
    """Prompt a: two valid episodes and a failed one; b: one is left; c: none."""
    rollouts = [played(ONE, ONE), None, played(ONE), None, played(ONE), None]
    names = ["a", "a", "a", "b", "b", "c"]
    columns = skyrl.batch_columns(rollouts, range(6), names)
    assert columns["trajectory_ids"] == [0, 0, 2, 4, 5] and columns["is_last_step"] == [False, True, True, True, True]
    assert [any(mask) for mask in columns["loss_masks"]] == [True, True, True, False, False]
    assert columns["rewards"] == [0.0, 1.0, 1.0, 1.0, 1.0], "what stands for a prompt has the mean of the others"
    assert columns["rollout_metrics"] == {
        "openhands/turns": pytest.approx(sum(each.turns for each in rollouts if each) / 3),
        "openhands/failed": 3.0,
        "openhands/groups_without_episode": 1.0,
        "openhands/groups_of_one": 1.0,
    }
    judged = skyrl.batch_columns(rollouts, range(6), names, evaluation=True)
    assert judged["trajectory_ids"] == [0, 0, 2, 4] and all(any(mask) for mask in judged["loss_masks"])
    with pytest.raises(ExchangeError, match="no episode of the batch is valid"):
        skyrl.batch_columns([None, None], range(2), ["a", "a"])


@given(SEGMENTS)
def test_verl(sent: list[Sample]):
    rows = verl.agent_loop_rows(played(*sent), longest_prompt=99, longest_response=99)
    assert {row["reward_score"] for row in rows} == {1.0}
    assert rows[0]["extra_fields"] == {"min_global_steps": 3, "max_global_steps": 3}
    assert same(verl.samples_of_agent_loop(as_json(rows)), sent)


@given(SAMPLE)
def test_openenv_and_openrlhf(sample: Sample):
    turns = openenv.training_turns([sample])
    assert [len(turn["prompt_token_ids"]) for turn in turns] == [start for _, start, _ in sample.spans]
    assert len({turn["node_id"] for turn in turns}) == len(turns)
    assert same(openenv.samples_of_turns(as_json(turns)), [sample], "trajectory_id")
    row = openrlhf.observed_tokens([sample])
    assert row["action_ranges"] == [(start, stop) for _, start, stop in sample.spans]
    assert same([openrlhf.sample_of_observed(as_json(row))], [sample])
    without = sample.model_copy(update={"spans": ()})
    assert same(openenv.samples_of_turns(openenv.training_turns([without])), [sample])


def test_segments_that_do_not_extend_stay_apart():
    other = sample_of([([9, 9], [(7, -0.5)])], 0.5)
    assert same(openenv.samples_of_turns(openenv.training_turns([ONE, other])), [ONE, other])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"temperature": 0.7}, "sampled at temperature 0.7, and TRL trains at 1"),
        ({"token_temperatures": (1.0, 1.0, 1.0, 0.5, 1.0, 1.0)}, "temperature 0.5, 1"),
        ({"count": 2}, "it stands for 2 equal samples"),
        ({"token_advantages": (0.0,) * 6}, "one advantage for a sequence"),
        ({"mask": (True,) * 6}, "begins with a sampled token"),
        ({"mask": (False,) * 6}, "nothing in it was sampled"),
        ({"logprobs": (0.0, 0.0, float("nan"), 0.0, 0.0, 0.0)}, "not finite"),
        ({"logprobs": (0.0,)}, "different lengths"),
    ],
)
def test_what_would_be_trained_wrongly_is_refused(change: dict[str, object], said: str):
    with pytest.raises(ExchangeError, match=said):
        trl.generated_columns([played(ONE.model_copy(update=change))])


def test_what_a_format_cannot_carry_is_refused():
    failure = Failure(kind=FailureKind.INFRASTRUCTURE, message="the server went away", boundary="x")
    for lost in (played(failure=failure, reward=None, segments=()), played(ONE, reward=None), played()):
        for convert in (
            lambda each: trl.generated_columns([each]),
            lambda each: skyrl.generator_columns([each], ["a"]),
            lambda each: verl.agent_loop_rows(each, longest_prompt=9, longest_response=9),
        ):
            with pytest.raises(ExchangeError, match="task: no episode to train on"):
                convert(lost)
    with pytest.raises(ExchangeError, match="one sequence an episode"):
        trl.generated_columns([played(ONE, ONE)])
    with pytest.raises(ExchangeError, match="step_wise_trajectories"):
        skyrl.generator_columns([played(ONE, ONE)], ["a"])
    with pytest.raises(ExchangeError, match=r"4 tokens are more than data\.max_response"):
        verl.agent_loop_rows(played(ONE), longest_prompt=9, longest_response=3)
    with pytest.raises(ExchangeError, match="OpenRLHF takes one"):
        openrlhf.observed_tokens([ONE, ONE])
    with pytest.raises(ExchangeError, match="above 0"):
        openenv.training_turns([ONE.model_copy(update={"logprobs": (0.0, 0.0, 0.5, 0.0, 0.0, 0.0)})])


def test_a_rollout_function_of_trl():
    columns = trl.generated_columns([played(ONE)])
    assert columns == {
        "prompt_ids": [[1, 2]],
        "completion_ids": [[3, 4, 5, 6]],
        "logprobs": [[-0.5, -0.25, 0.0, -1.0]],
        "env_mask": [[1, 1, 0, 1]],
        "rollout_reward": [1.0],
    }
