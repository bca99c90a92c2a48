"""An episode stepped from outside: OpenRLHF's stock executor samples, and passes the texts of answers."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from typing import NoReturn, TypedDict

import torch
from torch import Tensor

from openhands_rl_plugin.core.errors import ModelError, TrainingError
from openhands_rl_plugin.core.templates.rendering import without_stop
from openhands_rl_plugin.core.types import (
    Completion,
    Failure,
    JsonObject,
    Message,
    PolicyRef,
    SamplingParams,
    Trajectory,
)
from openhands_rl_plugin.rollout.scoring import judge
from openhands_rl_plugin.training.openrlhf.rollouts import RolloutSource, logs_of, total_of
from openhands_rl_plugin.training.openrlhf.text import message_of, text_behind


class Step(TypedDict):
    """A step's result as OpenRLHF 0.11 reads it; ``rewards`` is a tensor, because it calls ``.item()``."""

    rewards: Tensor
    scores: Tensor
    environment_feedback: str
    done: bool
    extra_logs: dict[str, Tensor]


class SteppedEpisode:
    """One episode, started by ``reset`` and ended by the last ``step``; an abandoned one closes its environment.

    It runs in an ordinary session, whose engine waits for the next ``step``.
    """

    def __init__(self, rollouts: RolloutSource) -> None:
        self._rollouts = rollouts
        self._template = rollouts.config.template
        self._engine = _WaitingEngine()
        self._session = rollouts.config.session(self._engine, _WaitingEngine.policy)
        self._playing: asyncio.Task[Trajectory] | None = None
        self._messages: tuple[Message, ...] = ()
        self._paid = 0.0

    async def reset(self, prompt: str, label: object) -> str:
        """The text of the first prompt. Raises ``ConfigError`` or ``TrainingError``."""
        task = self._rollouts.config.task(prompt, label, self._template.stop)
        self._playing = asyncio.create_task(self._session.run(self._rollouts.request(task)))
        self._playing.add_done_callback(self._engine.end)
        # The stock executor abandons an episode without a call when its token budget is exhausted.
        weakref.finalize(self, self._playing.cancel)
        messages = await self._engine.asked.get()
        if messages is None:
            self._refuse(self._playing.result())
        self._messages = messages
        return self._template.render(self._messages, self._session.tree.tools)

    async def step(self, text: str) -> Step:
        """Execute one answer. Raises ``TrainingError`` when the episode failed or is not open."""
        if self._playing is None or self._playing.done():
            raise TrainingError("the episode is not open: reset it first, and do not step after its end")
        tools, turn = self._session.tree.tools, len(self._messages)
        spoken = without_stop(text, self._template.stop)
        self._engine.said.put_nowait(message_of(spoken, turn=turn, called=bool(tools)))
        messages = await self._engine.asked.get()
        if messages is None:
            return await self._last(self._playing.result())
        self._messages = messages
        behind = text_behind(self._template, messages, turn, tools)
        # The answer's end-of-turn token was sampled.
        behind = behind.removeprefix(text[len(spoken) :])
        nodes = self._session.tree.nodes
        earned = sum(nodes[at].reward or 0.0 for at in self._session.tree.path())
        return self._step(earned, behind, None)

    async def _last(self, trajectory: Trajectory) -> Step:
        score = await judge(self._rollouts.config.reward, trajectory)
        if isinstance(score, Failure):
            self._refuse(trajectory, score)
        return self._step(total_of(score, trajectory.task.id), "", trajectory)

    def _step(self, total: float, behind: str, ended: Trajectory | None) -> Step:
        """``total``: the sum of the episode's rewards so far."""
        paid, self._paid = total - self._paid, total
        logs = logs_of(ended) if ended is not None else {}
        return Step(
            rewards=torch.tensor(paid),
            scores=torch.tensor(total),
            environment_feedback=behind,
            done=ended is not None,
            extra_logs={name: torch.tensor(value) for name, value in logs.items()},
        )

    def _refuse(self, trajectory: Trajectory, failure: Failure | None = None) -> NoReturn:
        failure = failure or trajectory.failure
        why = f"{failure.message} ({failure.boundary})" if failure is not None else f"it stopped: {trajectory.stop}"
        raise TrainingError(f"task {trajectory.task.id} failed: {why}")


class _WaitingEngine:
    """An engine whose answers come from ``step``. ``asked`` receives every conversation, and ``None`` at the end."""

    policy = PolicyRef(base_model="openrlhf")

    def __init__(self) -> None:
        self.asked: asyncio.Queue[tuple[Message, ...] | None] = asyncio.Queue()
        self.said: asyncio.Queue[Message] = asyncio.Queue()

    def end(self, _: object) -> None:
        self.asked.put_nowait(None)

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """One answer."""
        if n != 1:
            raise ModelError("OpenRLHF's stock executor samples one answer a turn; use AgentExecutor, or StandardReAct")
        self.asked.put_nowait(tuple(messages))
        return [Completion(message=await self.said.get(), policy=self.policy)]
