"""Which episodes an algorithm may train on, by their stop reason and sampling parameters.

A policy gradient needs the probability with which an answer was sampled. At any temperature above 0 the trainer has
it: softmax of the logits divided by the temperature. A ``top_p``, ``top_k`` or ``min_p`` makes tokens impossible, and
penalties change the logits by what was said before: the importance ratio would be wrong, although it is 1 in the first
step, and neither clipping nor importance correction detects that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.judgements import asked_in_common
from openhands_rl_plugin.core.messages import NEUTRAL_PARAMETERS, altering_parameters
from openhands_rl_plugin.core.records import prompt_of
from openhands_rl_plugin.core.types import SamplingParams, StopReason, Trajectory
from openhands_rl_plugin.training.algorithms import Kind

_INTERRUPTED = frozenset({StopReason.TIMEOUT, StopReason.UNFINISHED})
_LIMIT_REACHED = frozenset({StopReason.TRUNCATED, StopReason.MAX_TURNS, StopReason.MAX_TOKENS})


def is_interrupted(trajectory: Trajectory) -> bool:
    """Whether a timeout or the end of the process ended the episode, so its reward is not a result of the policy."""
    return trajectory.stop in _INTERRUPTED


def is_cut_short(trajectory: Trajectory) -> bool:
    """Whether a limit, not the task, ended the episode or truncated its last answer."""
    last = next(reversed([*trajectory.sampled()]), None)
    by_limit = trajectory.stop in _LIMIT_REACHED or trajectory.stop is StopReason.TIMEOUT
    return by_limit or (last is not None and last.finish_reason == "length")


def is_overlong(trajectory: Trajectory, settings: TrainingSettings) -> bool:
    """Whether a limit cut the episode short and ``overlong`` excludes such episodes (DAPO's overlong filtering)."""
    return settings.overlong == "leave-out" and trajectory.stop in _LIMIT_REACHED


def samplings(trajectory: Trajectory) -> tuple[str, ...]:
    """The distinct ways of sampling of the answers that were acted on, in order: not neutral parameters with values."""
    return tuple(sorted({_in_words(node.sampling) or "temperature 1" for node in trajectory.sampled()}))


def off_policy_sampling(trajectory: Trajectory) -> str:
    """How an answer that was acted on was sampled, if not from the policy at a temperature; else empty."""
    found = (_in_words(node.sampling) for node in trajectory.sampled() if is_sampled_off_policy(node.sampling))
    return next(found, "")


def is_sampled_off_policy(params: SamplingParams | None) -> bool:
    """Whether an answer was sampled greedily, or not from softmax(logits / temperature)."""
    return params is not None and (params.temperature == 0 or bool(_altering(params)))


def temperature_of(params: SamplingParams | None) -> float:
    """The temperature; one that was not sent is taken to be 1."""
    return 1.0 if params is None or params.temperature is None else params.temperature


def _in_words(params: SamplingParams | None) -> str:
    altering = {} if params is None else _altering(params)
    if temperature_of(params) != 1.0:
        altering = {"temperature": temperature_of(params), **altering}
    return ", ".join(f"{name} = {value:g}" for name, value in altering.items())


def _altering(params: SamplingParams) -> dict[str, float]:
    return altering_parameters({name: getattr(params, name, None) for name in ("top_p", *NEUTRAL_PARAMETERS)})


def mixed_prompts(prompts: Mapping[str, int]) -> list[str]:
    """A line where episodes had different instructions: of each ``[rl.workspace] prompt`` how many."""
    if len(prompts) < 2:
        return []
    counts = ", ".join(f"{count} {prompt}" for prompt, count in sorted(prompts.items()))
    return [
        f"the episodes had different instructions ([rl.workspace] prompt: {counts}): all are trained, and only those "
        "with the same are compared; a model that will have one of them learns best from that one alone"
    ]


def regrouped(trajectory: Trajectory, kind: Kind) -> Trajectory:
    """The episode, with a group id for all episodes of one task and one policy version, across runs.

    A baseline estimates the expected return of one policy on one task, and a preference pair must differ in quality,
    not in the way of sampling. So episodes that are compared also have the same strategy, sampling and prompt;
    for SFT the best episodes of a task may have different ones.
    """
    key = [*asked_in_common(trajectory.task), trajectory.policy.served_name]
    if kind != "imitation":
        options = {name: value for name, value in trajectory.strategy.options.items() if name != "seed"}
        key += [
            trajectory.strategy.name,
            json.dumps(options, sort_keys=True),
            str(samplings(trajectory)),
            prompt_of(trajectory),
        ]
    return trajectory.model_copy(update={"group_id": "\0".join(key)})
