"""Rollouts for OpenRLHF: episodes of the ``[rl]`` section, run by ``AgentSession``, in OpenRLHF's format.

An environment variable configures them, because OpenRLHF constructs its agents without arguments. A row of the dataset
is a task as JSON (``id``, ``instruction``, ``data``), or just the instruction.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from openhands_rl_plugin.config.build import make_environment, make_reward, make_strategy, strategy_spec
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.core.errors import ConfigError, ModelError, TrainingError, describe
from openhands_rl_plugin.core.messages import to_wire
from openhands_rl_plugin.core.templates import chat_text
from openhands_rl_plugin.core.types import (
    Completion,
    EpisodeRequest,
    Failure,
    JsonObject,
    Message,
    PolicyRef,
    SamplingParams,
    Score,
    StopReason,
    Task,
    Tokens,
    Trajectory,
    Usage,
)
from openhands_rl_plugin.models.server.wire import answer_message
from openhands_rl_plugin.rollout.episode import AgentSession
from openhands_rl_plugin.rollout.scoring import judge
from openhands_rl_plugin.training.algorithms import samples_of
from openhands_rl_plugin.training.data.dataset import is_cut_short

CONFIG = "OPENHANDS_RL_CONFIG"
_TRIES = 3  # a third failure in a row is seldom chance


Rollout = dict[str, Any]
"""One episode as OpenRLHF 0.11 reads it.

``observation_tokens``: all ids, up to the last sampled one; ``action_ranges``: start and end of each span of sampled
ids; ``rollout_log_probs``: one per id, 0.0 for ids that were not sampled, ``None`` unless requested. ``extra_logs`` has
the same keys in every episode.
"""


class Rollouts:
    """Runs episodes by OpenRLHF's protocol of an agent; one object may run many at the same time.

    ``OPENHANDS_RL_CONFIG`` in ``environ`` names a config.toml. Raises ``ConfigError`` when that is missing or invalid.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        if not (path := environ.get(CONFIG)):
            raise ConfigError(f"{CONFIG} is not set: export {CONFIG}=/path/to/config.toml with an [rl] section")
        self._settings = load_settings(Path(path))
        self._reward = make_reward(self._settings.reward)
        self._samples = itertools.count()

    def task(self, prompt: str, label: object) -> Task:
        """The task of a row. Raises ``ConfigError`` for a row that is none."""
        row: Any = None
        with suppress(ValueError):
            row = json.loads(prompt)
        if not isinstance(row, dict):
            row = dict[str, Any](instruction=prompt)
        labelled = {} if label in ("", None) else {"label": label}  # the row's own label takes precedence
        named = {"id": hashlib.sha256(prompt.encode()).hexdigest()[:16], **row, "environment": self._settings.env_name}
        try:
            return Task.model_validate({**named, "data": {**labelled, **row.get("data", {})}})
        except (ValidationError, TypeError) as error:
            raise ConfigError(f"a row of the dataset is not a task: {describe(error)}") from error

    async def execute(
        self,
        prompt: str,
        label: object,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: object = None,
    ) -> Rollout:
        """One episode. A failed one is retried, because OpenRLHF cannot exclude it from a baseline.

        Raises ``ConfigError`` for an invalid row, ``TrainingError`` when all retries failed too.
        """
        if images or any(marker in prompt for marker in hf_tokenizer.all_special_tokens):
            raise ConfigError("a row is a task as text: drop --data.apply_chat_template, and set no images")
        task, why = self.task(prompt, label), ""
        for _ in range(_TRIES):
            trajectory = await self._episode(task, sampling_params, max_length, hf_tokenizer, llm_engine)
            score = await judge(self._reward, trajectory)
            if isinstance(score, Score) and score.reward is not None:
                rollout = _rollout(trajectory, score.reward, with_logprobs=sampling_params.logprobs is not None)
                return {"prompt": prompt, "label": label, "images": None, "mm_train_inputs": None, **rollout}
            why = score.message if isinstance(score, Failure) else f"{score.reward_version} gave no reward"
        raise TrainingError(
            f"task {task.id} failed {_TRIES} times, at last with: {why}; fix the cause or remove the task"
        )

    async def _episode(self, task: Task, sampling: Any, max_length: int, tokenizer: Any, generator: Any) -> Trajectory:
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
            raise ConfigError(f"task {task.id}: its first prompt leaves no room for an answer; raise --data.max_len")
        return trajectory


def _rollout(trajectory: Trajectory, reward: float, *, with_logprobs: bool) -> Rollout:
    cut_short = is_cut_short(trajectory)
    samples = samples_of(trajectory, need_logprobs=with_logprobs)
    if len(samples) != 1:
        raise TrainingError(
            f"task {trajectory.task.id}: its turns are {len(samples)} sequences, and OpenRLHF takes one; use "
            "StandardReAct"
        )
    (sample,) = samples
    return Rollout(
        reward=reward,
        scores=reward,
        observation_tokens=[*sample.input_ids],
        action_ranges=[(start, stop) for _, start, stop in sample.spans],
        rollout_log_probs=[*sample.logprobs] if with_logprobs else None,
        truncated=cut_short,
        extra_logs={"agent_turns": float(len([*trajectory.sampled()])), "agent_cut_short": float(cut_short)},
    )


class OpenRLHFEngine:
    """OpenRLHF's engine for one episode: ids in, ids out; sampled text is never tokenised again.

    Args:
        generator: samples the answers: OpenRLHF's ``RolloutRayActor``.
        tokenizer: a Hugging Face tokenizer with a chat template.
        sampling: OpenRLHF's ``SamplingParams`` of vLLM; copied for every answer, never changed.
        longest: maximal number of tokens of prompt and answers together.
        answer: maximal number of tokens of one answer.
    """

    def __init__(self, generator: Any, tokenizer: Any, sampling: Any, *, longest: int, answer: int) -> None:
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
        """Sample ``n`` answers by OpenRLHF's parameters. Raises ``ModelError`` when there is no room for one."""
        prompt = self._prompt(tuple(messages), tools)
        room = self._longest - len(prompt)
        if room < 1:
            self.full = True
            raise ModelError(f"the conversation has {len(prompt)} tokens of {self._longest}: raise --data.max_len")
        wanted = deepcopy(self._sampling)
        wanted.max_tokens = min(self._answer, room)
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
