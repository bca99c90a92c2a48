"""Episodes as the rows of TRL, SkyRL and verl. No trainer is imported: rows are plain values with its field
names.

What is not carried: the temperature (one for all), the places of answers, and advantages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from openhands_rl_plugin.apps.rollout.rollout import PlayedRollout
from openhands_rl_plugin.core.types import JsonObject, Sample
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError

NAMES: Mapping[str, tuple[str, str, str, str]] = {
    "TRL": ("prompt_ids", "completion_ids", "env_mask", "logprobs"),
    "SkyRL": ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs"),
    "verl": ("prompt_ids", "response_ids", "response_mask", "response_logprobs"),
}
"""Trainer -> its names for the ids before the first sampled one, for those from there on, and for the mask and the
logprobs of these."""


def outcome(rollout: PlayedRollout) -> float:
    """The reward of an episode that can be trained on. Raises ``ExchangeError`` for another one: it is never 0."""
    if rollout.failure is None and rollout.reward is not None and rollout.segments:
        return rollout.reward
    why = rollout.failure.message if rollout.failure is not None else "it has no reward or no token ids"
    raise ExchangeError(f"{rollout.task_id}: no episode to train on ({why}): roll it out again")


def segments(samples: Sequence[Sample], trainer: str, *, temperature: float = 1.0) -> list[dict[str, Any]]:
    """A row for each training sequence, with the ``NAMES`` of a trainer, which divides logits by ``temperature``.

    Raises ``ExchangeError`` for a completion at another one: it would be trained wrongly without a word.
    """
    rows: list[JsonObject] = []
    for sample in samples:
        if (found := {sample.temperature_at(at) for at, own in enumerate(sample.mask) if own}) != {temperature}:
            known, where = ", ".join(f"{each:g}" for each in sorted(found)), f"trajectory {sample.trajectory_id}"
            raise ExchangeError(f"{where}: sampled at temperature {known}, and {trainer} trains at {temperature:g}")
        start = sample.mask.index(True)
        ids, mask, logprobs = sample.input_ids, map(int, sample.mask[start:]), sample.logprobs[start:]
        values: list[Any] = [[*ids[:start]], [*ids[start:]], [*mask], [*logprobs]]
        rows.append(dict(zip(NAMES[trainer], values, strict=True)))
    return rows


def batch_columns(
    rollouts: Sequence[PlayedRollout | None],
    trajectory_ids: Sequence[object],
    groups: Sequence[str],
    *,
    temperature: float = 1.0,
    evaluation: bool = False,
) -> dict[str, Any]:
    """SkyRL's ``GeneratorOutput`` with ``generator.step_wise_trajectories=true``: a row for each sequence of a batch.

    Rows of an episode stand together, and the reward on the last, whose advantage SkyRL gives to all of them. Episodes
    that failed (``None``) are left out, and in no baseline. ``groups`` names the prompt of each, which stand together.
    SkyRL counts the prompts, so that one without a valid episode has a row of which nothing is trained, at the mean
    reward of the others. Where one episode is left to compare, nothing of it is trained either: its advantage would be
    its reward. ``evaluation``: neither is needed. Raises ``ExchangeError``, also where no episode is valid.
    """
    valid = [rollout for rollout in rollouts if rollout is not None]
    if not valid:
        raise ExchangeError("no episode of the batch is valid")
    mean = sum(map(outcome, valid)) / len(valid)
    rows: list[dict[str, Any]] = []
    empty = lone = 0
    for _, members in groupby(zip(rollouts, trajectory_ids, groups, strict=True), key=lambda each: each[2]):
        group = list(members)
        kept = [(rollout, identity) for rollout, identity, _ in group if rollout is not None]
        alone = len(kept) == 1 < len(group) and not evaluation
        lone += alone
        if not kept and not evaluation:
            empty += 1
            token = valid[0].segments[0].input_ids[0]
            row = dict(zip(NAMES["SkyRL"], ([token], [token], [0], [0.0]), strict=True))
            rows.append(row | _step(group[0][1], mean, "abort", last=True))
        for rollout, identity in kept:
            reward, made = outcome(rollout), segments(rollout.segments, "SkyRL", temperature=temperature)
            for number, row in enumerate(made, 1):
                last = number == len(made)
                step = _step(identity, reward if last else 0.0, "length" if rollout.cut_short else "stop", last=last)
                rows.append(row | step | ({"loss_masks": [0] * len(row["loss_masks"])} if alone else {}))
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    metrics = {
        "openhands/turns": sum(each.turns for each in valid) / len(valid),
        "openhands/failed": float(len(rollouts) - len(valid)),
        "openhands/groups_without_episode": float(empty),
        "openhands/groups_of_one": float(lone),
    }
    return columns | {"rollout_metrics": metrics}


def _step(identity: object, reward: float, stop: str, *, last: bool) -> dict[str, Any]:
    return {"rewards": reward, "stop_reasons": stop, "trajectory_ids": identity, "is_last_step": last}


def agent_loop_rows(
    rollout: PlayedRollout, *, longest_prompt: int, longest_response: int, temperature: float = 1.0
) -> list[dict[str, Any]]:
    """The fields of verl 0.9's ``AgentLoopOutput``, one for each sequence of an episode.

    The limits are ``data.max_prompt_length`` and ``data.max_response_length``, in tokens. Raises ``ExchangeError`` for
    a failed episode (raise it on: verl then drops the whole prompt), and for a row that verl would cut without a word.
    """
    reward = outcome(rollout)
    rows: list[dict[str, Any]] = [*segments(rollout.segments, "verl", temperature=temperature)]
    for sample, row in zip(rollout.segments, rows, strict=True):
        limits = {"prompt_ids": (longest_prompt, "prompt"), "response_ids": (longest_response, "response")}
        for name, (limit, part) in limits.items():
            if (size := len(row[name])) > limit:
                setting = f"data.max_{part}_length = {limit}"
                raise ExchangeError(f"{rollout.task_id}: {size} tokens are more than {setting}; raise it")
        version = 0 if sample.policy is None else sample.policy.version or 0
        row |= {
            "reward_score": reward,
            "num_turns": 2 * rollout.turns,
            "metrics": {"generate_sequences": rollout.seconds},
            "extra_fields": {"min_global_steps": version, "max_global_steps": version},
        }
    return rows
