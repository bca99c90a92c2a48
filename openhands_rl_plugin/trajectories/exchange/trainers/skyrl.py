"""SkyRL 0.4 train: the columns of a ``GeneratorOutput``.

With one segment an episode a row is an episode; with several, which is ``generator.step_wise_trajectories=true``, rows
of an episode stand together and the reward on the last, whose advantage SkyRL gives to all of them. What is not
carried: advantages (SkyRL has its own), the policy's version, the temperature (one for all), the places of answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TypedDict, cast

from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError
from openhands_rl_plugin.trajectories.exchange.trainers.rollout import PlayedRollout
from openhands_rl_plugin.trajectories.exchange.trainers.sequences import checked, outcome, prompt_length, sample_from


class GeneratorColumns(TypedDict):
    """A ``GeneratorOutput``: an entry a row. ``trajectory_ids`` repeats what the caller gave for the episode."""

    prompt_token_ids: list[list[int]]
    response_ids: list[list[int]]
    rewards: list[float]
    loss_masks: list[list[int]]
    stop_reasons: list[str]
    rollout_metrics: dict[str, float]
    rollout_logprobs: list[list[float]]
    trajectory_ids: list[object]
    is_last_step: list[bool] | None


def generator_columns(
    rollouts: Sequence[PlayedRollout],
    trajectory_ids: Sequence[object],
    *,
    step_wise: bool = False,
    temperature: float = 1.0,
) -> GeneratorColumns:
    """The rows of episodes; ``trajectory_ids`` are those of the ``GeneratorInput``.

    Raises ``ExchangeError`` for a failed episode (without a row SkyRL refuses the batch, and a reward of 0 would be
    trained on), and for several segments where ``step_wise`` is off.
    """
    own = GeneratorColumns(
        prompt_token_ids=[],
        response_ids=[],
        rewards=[],
        loss_masks=[],
        stop_reasons=[],
        rollout_metrics={},
        rollout_logprobs=[],
        trajectory_ids=[],
        is_last_step=[] if step_wise else None,
    )
    for played, identity in zip(rollouts, trajectory_ids, strict=True):
        reward = outcome(played)
        if len(played.segments) > 1 and not step_wise:
            raise ExchangeError(
                f"{played.task_id}: it has {len(played.segments)} segments: set generator.step_wise_trajectories=true"
            )
        for number, segment in enumerate(played.segments, 1):
            last = number == len(played.segments)
            _add(own, checked(segment, "SkyRL", temperature=temperature), identity, reward if last else 0.0)
            own["stop_reasons"].append("length" if played.cut_short else "stop")
            if own["is_last_step"] is not None:
                own["is_last_step"].append(last)
    turns = sum(played.turns for played in rollouts) / max(1, len(rollouts))
    own["rollout_metrics"] = {"openhands/turns": turns}
    return own


def batch_columns(
    rollouts: Sequence[PlayedRollout | None],
    trajectory_ids: Sequence[object],
    groups: Sequence[str],
    *,
    temperature: float = 1.0,
    evaluation: bool = False,
) -> GeneratorColumns:
    """The step-wise rows of a batch in which episodes failed (``None``): they are left out, and in no baseline.

    ``groups`` names the prompt of each, which stand together. SkyRL counts the prompts, so that one without a valid
    episode has a row of which nothing is trained, at the mean reward of the others. Where one episode is left to
    compare, nothing of it is trained either: its advantage would be its reward. ``evaluation``: neither is needed.
    Raises ``ExchangeError``, also where no episode is valid.
    """
    given = list(zip(rollouts, trajectory_ids, groups, strict=True))
    valid = [played for played in rollouts if played is not None]
    if not valid:
        raise ExchangeError("no episode of the batch is valid")
    mean = sum(map(outcome, valid)) / len(valid)
    own = generator_columns((), (), step_wise=True)
    empty = lone = 0
    for _, members in groupby(given, key=lambda each: each[2]):
        group = list(members)
        kept = [(played, identity) for played, identity, _ in group if played is not None]
        rows = generator_columns(*zip(*kept, strict=True), step_wise=True, temperature=temperature) if kept else None
        if rows is None and not evaluation:
            rows, empty = _untrained(group[0][1], valid[0].segments[0].input_ids[0], mean), empty + 1
        elif rows is not None and len(kept) == 1 < len(group) and not evaluation:
            rows["loss_masks"], lone = [[0] * len(mask) for mask in rows["loss_masks"]], lone + 1
        for name, column in (rows or {}).items():
            if isinstance(column, list):
                cast("dict[str, list[object]]", own)[name].extend(column)
    own["rollout_metrics"] = {
        "openhands/turns": sum(each.turns for each in valid) / len(valid),
        "openhands/failed": float(len(rollouts) - len(valid)),
        "openhands/groups_without_episode": float(empty),
        "openhands/groups_of_one": float(lone),
    }
    return own


def _untrained(identity: object, token: int, reward: float) -> GeneratorColumns:
    return GeneratorColumns(
        prompt_token_ids=[[token]],
        response_ids=[[token]],
        rewards=[reward],
        loss_masks=[[0]],
        stop_reasons=["abort"],
        rollout_metrics={},
        rollout_logprobs=[[0.0]],
        trajectory_ids=[identity],
        is_last_step=[True],
    )


def _add(own: GeneratorColumns, sample: Sample, identity: object, reward: float) -> None:
    start = prompt_length(sample)
    own["prompt_token_ids"].append([*sample.input_ids[:start]])
    own["response_ids"].append([*sample.input_ids[start:]])
    own["loss_masks"].append([*map(int, sample.mask[start:])])
    own["rollout_logprobs"].append([*sample.logprobs[start:]])
    own["rewards"].append(reward)
    own["trajectory_ids"].append(identity)


def samples_of_columns(columns: GeneratorColumns, *, temperature: float = 1.0) -> list[Sample]:
    """The sequences of the rows."""
    names = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")
    samples: list[Sample] = []
    for prompt, response, mask, logprobs in zip(*(columns[name] for name in names), strict=True):
        ids, before = (*prompt, *response), [0] * len(prompt)
        samples.append(sample_from(ids, (*before, *mask), (*before, *logprobs), temperature=temperature))
    return samples
