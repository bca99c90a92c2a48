"""Rollouts for OpenRLHF: episodes of the ``[rl]`` section, run by ``AgentSession``, in OpenRLHF's format.

They are configured by four environment variables (see ``RolloutConfig``), because OpenRLHF constructs its agents
without arguments. A row of the dataset is a task as JSON (``id``, ``instruction``, ``data``), or just the instruction.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self, TypedDict

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from openhands_rl_plugin.config.build import make_environment, make_reward, make_strategy, strategy_spec
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.core.errors import ConfigError, ModelError, TrainingError, describe
from openhands_rl_plugin.core.protocols import LLMEngine, Reward
from openhands_rl_plugin.core.templates.rendering import ChatTemplate, template_for, without_stop
from openhands_rl_plugin.core.types import (
    Completion,
    EpisodeRequest,
    Failure,
    Frozen,
    JsonObject,
    Message,
    PolicyRef,
    SamplingParams,
    Score,
    StopReason,
    Task,
    Trajectory,
)
from openhands_rl_plugin.models.server.responses import answer_message
from openhands_rl_plugin.rollout.scoring import judge
from openhands_rl_plugin.rollout.session import AgentSession
from openhands_rl_plugin.training.data.batch import is_cut_short, samples_of
from openhands_rl_plugin.training.openrlhf.engine import OpenRLHFEngine, TokenGenerator, text_behind
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError
from openhands_rl_plugin.trajectories.exchange.segments import observed_tokens

CONFIG, REWARD, TEMPLATE, RETRIES = (
    "OPENHANDS_RL_CONFIG",
    "OPENHANDS_RL_REWARD",
    "OPENHANDS_RL_TEMPLATE",
    "OPENHANDS_RL_RETRIES",
)


class Rollout(TypedDict):
    """One episode as OpenRLHF 0.11 reads it.

    ``observation_tokens``: all ids, up to the last sampled one; ``action_ranges``: start and end of each span of
    sampled ids; ``rollout_log_probs``: one per id, 0.0 for ids that were not sampled, ``None`` unless requested.
    ``extra_logs`` has the same keys in every episode.
    """

    prompt: str
    label: object
    images: None
    mm_train_inputs: None
    reward: float
    scores: float
    observation_tokens: list[int]
    action_ranges: list[tuple[int, int]]
    rollout_log_probs: list[float] | None
    truncated: bool
    extra_logs: dict[str, float]


class _TaskRow(Frozen):
    id: str = ""
    instruction: str = ""
    data: JsonObject = Field(default_factory=dict)
    split: str = ""


@dataclass(frozen=True)
class RolloutConfig:
    """The configuration of the rollouts, from environment variables.

    ``OPENHANDS_RL_CONFIG``: a config.toml; ``OPENHANDS_RL_REWARD``: a reward instead of that of ``[rl.reward]``, with
    its default options; ``OPENHANDS_RL_TEMPLATE``: the model's family, for an ``AgentInstance``, which has no tokenizer
    (default: qwen3); ``OPENHANDS_RL_RETRIES``: how often a failed episode is retried (default: 2).
    """

    settings: RLSettings
    reward: Reward
    template: ChatTemplate
    retries: int

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the variables. Raises ``ConfigError`` when one of them, or the file that it names, is invalid."""
        environ = os.environ if environ is None else environ
        if not (path := environ.get(CONFIG)):
            raise ConfigError(f"{CONFIG} is not set: export {CONFIG}=/path/to/config.toml with an [rl] section")
        retries = environ.get(RETRIES, "2")
        if not retries.isdecimal():
            raise ConfigError(f"{RETRIES} must be a whole number, not {retries!r}")
        settings = load_settings(Path(path), environ)
        return cls(
            settings=settings,
            reward=make_reward(settings.reward.overridden(environ.get(REWARD) or None)),
            template=template_for(environ.get(TEMPLATE, "qwen3")),
            retries=int(retries),
        )

    def task(self, prompt: str, label: object, markers: Sequence[str] = ()) -> Task:
        """The task of a row. ``markers``: special tokens, by which a prompt that is already rendered is recognised.

        Raises ``ConfigError`` for a row that is not a task.
        """
        row = _row(prompt)
        if any(marker in row.instruction for marker in markers):
            raise ConfigError(
                "the prompts are rendered already: drop --data.apply_chat_template, the environment opens the "
                "conversation"
            )
        data = row.data if label in ("", None) else {"label": label, **row.data}  # the row's own label takes precedence
        identity = row.id or hashlib.sha256(prompt.encode()).hexdigest()[:16]
        try:
            return Task(
                id=identity,
                environment=self.settings.env_name,
                instruction=row.instruction,
                data=data,  # pyright: ignore[reportArgumentType]  (checked here)
                split=row.split,
            )
        except ValidationError as error:
            raise ConfigError(f"task {identity}: its label is not JSON: {describe(error)}") from error

    def session(self, engine: LLMEngine, policy: PolicyRef, longest: int | None = None) -> AgentSession:
        """A session with a new environment and strategy. ``longest``: maximal number of tokens of a conversation."""
        limits = self.settings.limits()
        if longest is not None:
            bound = min(longest, limits.max_prompt_length or longest)
            limits = limits.model_copy(update={"max_prompt_length": bound})
        return AgentSession(
            environment=make_environment(self.settings),
            strategy=make_strategy(self.settings),
            strategy_spec=strategy_spec(self.settings),
            engine=engine,
            policy=policy,
            limits=limits,
        )


class RolloutSource:
    """Runs episodes; one object may run many at the same time."""

    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        self._samples = itertools.count()

    def request(self, task: Task) -> EpisodeRequest:
        """A new request for every episode."""
        return EpisodeRequest(task=task, run_id="openrlhf", group_id=task.id, sample=next(self._samples))

    async def play(
        self,
        prompt: str,
        label: object,
        sampling: Any,
        max_length: int,
        tokenizer: Any,
        generator: TokenGenerator,
        images: object = None,
    ) -> Rollout:
        """One episode. A failed one is retried, because OpenRLHF cannot exclude it from a baseline.

        Raises ``ConfigError`` for an invalid row, ``TrainingError`` when all retries failed too.
        """
        if images:
            raise ConfigError("images are not supported: set --data.max_images_per_prompt 0")
        task = self.config.task(prompt, label, tuple(getattr(tokenizer, "all_special_tokens", ())))
        longest_answer = self.config.settings.limits().max_response_length
        failures: list[Failure] = []
        while len(failures) <= self.config.retries:
            engine = OpenRLHFEngine(generator, tokenizer, sampling, longest=max_length, answer=longest_answer)
            trajectory = await self._played(task, engine, max_length)
            score = await judge(self.config.reward, trajectory)
            if isinstance(score, Score):
                return _rollout(trajectory, score, prompt, label, with_logprobs=sampling.logprobs is not None)
            failures.append(score)
        raise TrainingError(
            f"task {task.id} failed {len(failures)} times, at last with: {failures[-1].message} "
            f"({failures[-1].boundary}); fix the cause or remove the task"
        )

    async def _played(self, task: Task, engine: OpenRLHFEngine, max_length: int) -> Trajectory:
        session = self.config.session(engine, engine.policy, max_length - 1)
        trajectory = await session.run(self.request(task))
        if engine.full:
            # A conversation without room for an answer has reached a limit; the model has not failed.
            trajectory = trajectory.model_copy(update={"failure": None, "stop": StopReason.MAX_TOKENS})
        if trajectory.failure is None and not any(trajectory.sampled()):
            raise ConfigError(
                f"task {task.id}: its first prompt leaves no room for an answer in {max_length} tokens; raise "
                "--data.max_len and [rl] max_prompt_length, or remove the task"
            )
        return trajectory


def total_of(score: Score, task: str) -> float:
    """The reward as a number. Raises ``TrainingError`` when the grader gave none."""
    if score.reward is None:
        raise TrainingError(f"task {task}: {score.reward_version} gave no reward; OpenRLHF needs one for every episode")
    return score.reward


def logs_of(trajectory: Trajectory) -> dict[str, float]:
    """OpenRLHF's ``extra_logs`` of an episode."""
    turns = sum(1 for _ in trajectory.sampled())
    return {"agent_turns": float(turns), "agent_cut_short": float(is_cut_short(trajectory))}


def _rollout(trajectory: Trajectory, score: Score, prompt: str, label: object, *, with_logprobs: bool) -> Rollout:
    try:
        # A server that was not asked for logprobs gave none.
        tokens = observed_tokens(samples_of(trajectory, need_logprobs=with_logprobs))
    except ExchangeError as error:
        raise TrainingError(f"task {trajectory.task.id}: {error}") from error
    reward = total_of(score, trajectory.task.id)
    return Rollout(
        prompt=prompt,
        label=label,
        images=None,
        mm_train_inputs=None,
        reward=reward,
        scores=reward,
        observation_tokens=tokens["observation_tokens"],
        action_ranges=tokens["action_ranges"],
        rollout_log_probs=tokens["rollout_log_probs"] if with_logprobs else None,
        truncated=is_cut_short(trajectory),
        extra_logs=logs_of(trajectory),
    )


def _row(prompt: str) -> _TaskRow:
    if not prompt.lstrip().startswith("{"):
        return _TaskRow(instruction=prompt)
    try:
        row = json.loads(prompt)
    except ValueError:
        return _TaskRow(instruction=prompt)
    try:
        return _TaskRow.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"a row of the dataset is not a task: {where}: {first['msg']}") from error


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
        self._engine.said.put_nowait(answer_message(spoken, tools, turn=turn))
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
