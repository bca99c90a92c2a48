"""Records what OpenHands' condensers ask a model: nodes of their own kind, beside the episode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from openhands.controller.state.state import State
from openhands.llm.llm import LLM
from openhands.memory.condenser.condenser import Condenser
from openhands.memory.condenser.impl.pipeline import CondenserPipeline

from openhands_rl_plugin.core.acted import CONDENSATION
from openhands_rl_plugin.core.messages import to_message
from openhands_rl_plugin.hosts.shared.episode import HostEpisode
from openhands_rl_plugin.hosts.v0.recorder import Attempt, CallLog, record_completions, recording


def record_condenser(condenser: Condenser) -> None:
    """Record the models that a condenser asks. Idempotent."""
    for llm in _models(condenser):
        record_completions(llm, CONDENSATION)


@contextmanager
def recorded_condensations(episode: HostEpisode, state: State) -> Iterator[None]:
    """What a condenser asks a model in this context becomes part of the episode, also when it fails in the end."""
    step = state.iteration_flag.current_value
    log = CallLog(state.session_id, step, episode.base_model, ask_tokens=episode.token_ids)
    try:
        with recording(log):
            yield
    finally:
        keep_condensations(episode, log.attempts)


def keep_condensations(episode: HostEpisode, attempts: Iterable[Attempt]) -> None:
    """Add a condenser's answered requests to the episode."""
    for attempt in attempts:
        if attempt.completion is not None:
            prompt = [to_message(message) for message in attempt.messages]
            episode.tree.aside(prompt, attempt.completion, CONDENSATION)


def _models(condenser: Condenser) -> Iterator[LLM]:
    if isinstance(condenser, CondenserPipeline):
        for each in condenser.condensers:
            yield from _models(each)
    elif isinstance(llm := getattr(condenser, "llm", None), LLM):
        yield llm
