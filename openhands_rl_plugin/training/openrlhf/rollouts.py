"""Rollouts for OpenRLHF: episodes of the ``[rl]`` section, run by ``AgentSession``, in OpenRLHF's format.

Two environment variables configure them (see ``Rollouts.from_environment``), because OpenRLHF constructs its agents
without arguments. A row of the dataset is a task as JSON (``id``, ``instruction``, ``data``), or just the instruction.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol, Self

from pydantic import ValidationError

from openhands_rl_plugin.config.build import make_environment, make_reward, make_strategy, strategy_spec
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.core.errors import ConfigError, ModelError, TrainingError, describe
from openhands_rl_plugin.core.messages import to_wire
from openhands_rl_plugin.core.protocols import Reward
from openhands_rl_plugin.core.templates.chat import chat_text
from openhands_rl_plugin.core.types import (
    Completion,
    EpisodeRequest,
    Failure,
    JsonObject,
    Message,
    PolicyRef,
    Sample,
    SamplingParams,
    Score,
    StopReason,
    Task,
    Tokens,
    Trajectory,
    Usage,
)
from openhands_rl_plugin.models.server.wire import answer_message
from openhands_rl_plugin.rollout.scoring import judge
from openhands_rl_plugin.rollout.session import AgentSession
from openhands_rl_plugin.training.data.batch import is_cut_short, samples_of
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError

CONFIG, REWARD = "OPENHANDS_RL_CONFIG", "OPENHANDS_RL_REWARD"
_RETRIES = 2  # a third failure in a row is seldom chance


Rollout = dict[str, Any]
"""One episode as OpenRLHF 0.11 reads it.

``observation_tokens``: all ids, up to the last sampled one; ``action_ranges``: start and end of each span of sampled
ids; ``rollout_log_probs``: one per id, 0.0 for ids that were not sampled, ``None`` unless requested. ``extra_logs`` has
the same keys in every episode.
"""


class Rollouts:
    """Runs episodes; one object may run many at the same time."""

    def __init__(self, settings: RLSettings, reward: Reward) -> None:
        self._settings = settings
        self._reward = reward
        self._samples = itertools.count()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """``OPENHANDS_RL_CONFIG``: a config.toml; ``OPENHANDS_RL_REWARD``: a reward instead of that of ``[rl.reward]``.

        Raises ``ConfigError`` when one of them, or the file that it names, is invalid.
        """
        environ = os.environ if environ is None else environ
        if not (path := environ.get(CONFIG)):
            raise ConfigError(f"{CONFIG} is not set: export {CONFIG}=/path/to/config.toml with an [rl] section")
        settings = load_settings(Path(path), environ)
        return cls(settings, make_reward(settings.reward.overridden(environ.get(REWARD) or None)))

    def task(self, prompt: str, label: object, markers: Sequence[str] = ()) -> Task:
        """The task of a row. ``markers``: special tokens, by which a prompt that is already rendered is recognised.

        Raises ``ConfigError`` for a row that is not a task.
        """
        row = _row(prompt)
        if any(marker in str(row.get("instruction", "")) for marker in markers):
            raise ConfigError(
                "the prompts are rendered already: drop --data.apply_chat_template, the environment opens the "
                "conversation"
            )
        data = row.get("data", {})
        if label not in ("", None) and isinstance(data, dict):
            data = {"label": label, **data}  # the row's own label takes precedence
        named = {"id": hashlib.sha256(prompt.encode()).hexdigest()[:16], **row}
        try:
            return Task.model_validate({**named, "data": data, "environment": self._settings.env_name})
        except ValidationError as error:
            raise ConfigError(f"a row of the dataset is not a task: {describe(error)}") from error

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
        task = self.task(prompt, label, tuple(getattr(tokenizer, "all_special_tokens", ())))
        score: Score | Failure | None = None
        for _ in range(_RETRIES + 1):
            trajectory = await self._episode(task, sampling, max_length, tokenizer, generator)
            score = await judge(self._reward, trajectory)
            if isinstance(score, Score):
                return _rollout(trajectory, score, prompt, label, with_logprobs=sampling.logprobs is not None)
        assert score is not None
        raise TrainingError(
            f"task {task.id} failed {_RETRIES + 1} times, at last with: {score.message} ({score.boundary}); fix the "
            "cause or remove the task"
        )

    async def _episode(
        self, task: Task, sampling: Any, max_length: int, tokenizer: Any, generator: TokenGenerator
    ) -> Trajectory:
        limits = self._settings.limits()
        engine = OpenRLHFEngine(generator, tokenizer, sampling, longest=max_length, answer=limits.max_response_length)
        bound = min(max_length - 1, limits.max_prompt_length or max_length)
        session = AgentSession(
            environment=make_environment(self._settings),
            strategy=make_strategy(self._settings),
            strategy_spec=strategy_spec(self._settings),
            engine=engine,
            policy=engine.policy,
            limits=limits.model_copy(update={"max_prompt_length": bound}),
        )
        request = EpisodeRequest(task=task, run_id="openrlhf", group_id=task.id, sample=next(self._samples))
        trajectory = await session.run(request)
        if engine.full:
            # A conversation without room for an answer has reached a limit; the model has not failed.
            trajectory = trajectory.model_copy(update={"failure": None, "stop": StopReason.MAX_TOKENS})
        if trajectory.failure is None and not any(trajectory.sampled()):
            raise ConfigError(
                f"task {task.id}: its first prompt leaves no room for an answer in {max_length} tokens; raise "
                "--data.max_len and [rl] max_prompt_length, or remove the task"
            )
        return trajectory


def _rollout(trajectory: Trajectory, score: Score, prompt: str, label: object, *, with_logprobs: bool) -> Rollout:
    task, cut_short = trajectory.task.id, is_cut_short(trajectory)
    if score.reward is None:
        raise TrainingError(f"task {task}: {score.reward_version} gave no reward; OpenRLHF needs one for every episode")
    try:
        # A server that was not asked for logprobs gave none.
        tokens = observed_tokens(samples_of(trajectory, need_logprobs=with_logprobs))
    except ExchangeError as error:
        raise TrainingError(f"task {task}: {error}") from error
    return Rollout(
        prompt=prompt,
        label=label,
        images=None,
        mm_train_inputs=None,
        reward=score.reward,
        scores=score.reward,
        observation_tokens=tokens["observation_tokens"],
        action_ranges=tokens["action_ranges"],
        rollout_log_probs=tokens["rollout_log_probs"] if with_logprobs else None,
        truncated=cut_short,
        extra_logs={"agent_turns": float(len([*trajectory.sampled()])), "agent_cut_short": float(cut_short)},
    )


def _row(prompt: str) -> JsonObject:
    try:
        row = json.loads(prompt)
    except ValueError:
        row = None
    return row if isinstance(row, dict) else {"instruction": prompt}


class TokenGenerator(Protocol):
    """The method of OpenRLHF's ``RolloutRayActor`` that is used; it returns vLLM's ``RequestOutput``."""

    async def generate(self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """Sample one answer."""
        ...


class OpenRLHFEngine:
    """OpenRLHF's engine for one episode: ids in, ids out; sampled text is never tokenised again.

    Args:
        generator: samples the answers.
        tokenizer: a Hugging Face tokenizer with a chat template.
        sampling: OpenRLHF's ``SamplingParams`` of vLLM; copied for every answer, never changed.
        longest: maximal number of tokens of prompt and answers together.
        answer: maximal number of tokens of one answer.
    """

    def __init__(self, generator: TokenGenerator, tokenizer: Any, sampling: Any, *, longest: int, answer: int) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._longest = longest
        self._answer = min(answer, sampling.max_tokens or answer)
        self._contexts: dict[tuple[Message, ...], tuple[int, ...]] = {}
        self.policy = PolicyRef(base_model=str(getattr(tokenizer, "name_or_path", "") or "openrlhf"))
        self.full = False
        """Whether a conversation has left no room for another answer."""

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Sample ``n`` answers. Raises ``ModelError`` when there is no room for one."""
        prompt = self._prompt(tuple(messages), tools)
        room = self._longest - len(prompt)
        if room < 1:
            self.full = True
            raise ModelError(f"the conversation has {len(prompt)} tokens of {self._longest}: raise --data.max_len")
        wanted = self._wanted(sampling or SamplingParams(), room)
        answers = await asyncio.gather(*(self._generator.generate(list(prompt), deepcopy(wanted)) for _ in range(n)))
        return [self._completion(tuple(messages), prompt, answer.outputs[0], tools) for answer in answers]

    def _prompt(self, messages: tuple[Message, ...], tools: Sequence[JsonObject]) -> tuple[int, ...]:
        """The ids of the longest known prefix that ends with an answer, and those of the text after it."""
        for end in range(len(messages), 0, -1):
            if (known := self._contexts.get(messages[:end])) is not None:
                behind = self._ids(self._text_behind(messages, end - 1, tools))
                # A complete answer ends with its sampled end-of-turn token; a truncated one has none.
                return known + (behind[1:] if known[-1:] == behind[:1] else behind)
        return self._ids(self._text(messages, tools))

    def _text_behind(self, messages: Sequence[Message], answer: int, tools: Sequence[JsonObject]) -> str:
        """The text after the answer at index ``answer``: the end of its turn and later turns."""
        shown = [*messages[:answer], Message(role="assistant", content=_STAND_IN), *messages[answer + 1 :]]
        before, found, behind = self._text(shown, tools).rpartition(_STAND_IN)
        if not found or _STAND_IN in before:
            raise ModelError("the chat template omits the assistant's answers; use a model with another template")
        return behind

    def _text(self, messages: Sequence[Message], tools: Sequence[JsonObject]) -> str:
        return chat_text(self._tokenizer, [to_wire(each) for each in messages], tools, cue=True)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _wanted(self, sampling: SamplingParams, room: int) -> Any:
        """OpenRLHF's parameters, with those that the strategy chooses."""
        wanted = deepcopy(self._sampling)
        wanted.max_tokens = min(sampling.max_tokens or self._answer, self._answer, room)
        for name in ("temperature", "top_p", "seed"):
            if (value := getattr(sampling, name)) is not None:
                setattr(wanted, name, value)
        if sampling.stop:
            wanted.stop = list(sampling.stop)
        return wanted

    def _completion(
        self, messages: tuple[Message, ...], prompt: tuple[int, ...], output: Any, tools: Sequence[JsonObject]
    ) -> Completion:
        sampled = tuple(output.token_ids)
        # Not the engine's own text: OpenRLHF requests it with its special tokens.
        text = str(self._tokenizer.decode(list(sampled), skip_special_tokens=True))
        message = answer_message(text, tools, turn=len(messages))
        self._contexts[(*messages, message)] = prompt + sampled
        logprobs = (each[token].logprob for each, token in zip(output.logprobs or (), sampled, strict=False))
        return Completion(
            message=message,
            tokens=Tokens.of(prompt, sampled, logprobs),
            finish_reason=output.finish_reason,
            usage=Usage(prompt_tokens=len(prompt), completion_tokens=len(sampled), calls=1),
            policy=self.policy,
        )


_STAND_IN = "STAND-IN-FOR-WHAT-WAS-SAMPLED"


def observed_tokens(samples: Sequence[Sample]) -> dict[str, Any]:
    """The only sequence of an episode for OpenRLHF 0.11. Raises ``ExchangeError`` for another number of them.

    ``observation_tokens``: all ids, up to the last sampled one; ``action_ranges``: start and end of each completion.
    """
    if len(samples) != 1:
        raise ExchangeError(f"its turns are {len(samples)} sequences, and OpenRLHF takes one; use StandardReAct")
    (sample,) = samples
    if not sample.spans:
        raise ExchangeError(f"trajectory {sample.trajectory_id}: it does not say where its completions are")
    ranges = [(start, stop) for _, start, stop in sample.spans]
    ids = {"observation_tokens": [*sample.input_ids], "action_ranges": ranges}
    return {**ids, "rollout_log_probs": [*sample.logprobs]}
