"""P(success) from a trained verifier, which runs in this process or on a server.

A server is asked by OpenAI's ``POST /completions`` with vLLM's extensions. It samples one token and names the 20
likeliest: with a trained verifier both labels are among them.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from openhands_rl_plugin.core.errors import (
    CaughtFailure,
    GraderError,
    InfrastructureError,
    ModelError,
    PublishError,
    TrainingError,
    boundary,
    from_extra,
)
from openhands_rl_plugin.core.servers import named_key
from openhands_rl_plugin.core.types import Failure, FailureKind, Frozen, JsonObject, Score, Trajectory
from openhands_rl_plugin.models.adapters.publisher import ModelServer
from openhands_rl_plugin.models.engines.client import ServerError
from openhands_rl_plugin.rewards.verifier.card import VerifierCard, VerifierOutput

if TYPE_CHECKING:
    from openhands_rl_plugin.rewards.verifier.prompt import VerifierPrompt, VerifierPrompts


class VerifierOptions(Frozen):
    """``adapter``: a directory written by ``openhands-rl train --verifier``. ``model``: the base model's directory, if
    it has moved since training.

    With ``base_url`` (up to and including /v1) a server scores, on which the adapter has the name ``served_model``
    (default: the directory's name); ``api_key_env`` names a variable with the key, ``timeout`` is in seconds. Without
    it the model is loaded in this process, once for all rewards that use it.
    """

    adapter: str = Field(min_length=1)
    model: str = ""
    base_url: str = ""
    served_model: str = ""
    api_key_env: str = ""
    timeout: float = Field(default=120.0, gt=0)


Judge = Callable[[Sequence[tuple[int, ...]]], Awaitable[Sequence[VerifierOutput | Failure]]]
"""Prompts of the verifier -> one output per prompt, in order."""


class VerifierReward:
    """Scores are P(YES) in [0, 1]. A common prefix of the prompts of one call is computed once.

    Nothing is loaded before the first episode. Raises ``ConfigError`` when the directory has no verifier.
    """

    Options = VerifierOptions

    def __init__(self, options: VerifierOptions) -> None:
        self._options = options
        self._directory = Path(options.adapter).expanduser()
        self._card = VerifierCard.load(self._directory)

    @property
    def version(self) -> str:
        """Identifies the adapter's weights, and everything else that the scores depend on."""
        return self._card.version

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Score one episode. Raises ``GraderError``."""
        (outcome,) = await self.judge_all([trajectory])
        if isinstance(outcome, Failure):
            raise GraderError(outcome.message)
        return outcome

    async def judge_all(self, trajectories: Sequence[Trajectory]) -> list[Score | Failure]:
        """One outcome per episode, in order. Raises the error of a missing model, server or package."""
        valid = [trajectory for trajectory in trajectories if trajectory.failure is None]
        if not valid:
            return [trajectory.failure for trajectory in trajectories if trajectory.failure is not None]
        prompts = await asyncio.to_thread(lambda: [self._prompts.of(trajectory) for trajectory in valid])
        judge = await asyncio.to_thread(lambda: self._judge)
        verdicts = await judge([prompt.ids for prompt in prompts])
        found = iter([self._outcome(*each) for each in zip(valid, prompts, verdicts, strict=True)])
        return [trajectory.failure or next(found) for trajectory in trajectories]

    def _outcome(
        self, trajectory: Trajectory, prompt: VerifierPrompt, verdict: VerifierOutput | Failure
    ) -> Score | Failure:
        if isinstance(verdict, Failure):
            return verdict
        return Score(
            trajectory_id=trajectory.id,
            reward=self._card.calibration.probability(verdict.margin),
            detail={
                "margin": verdict.margin,
                "label_mass": verdict.mass,
                "tokens": len(prompt.ids),
                "truncated": prompt.truncated,
                "adapter": self._directory.name,
            },
            reward_version=self.version,
        )

    @cached_property
    def _prompts(self) -> VerifierPrompts:
        with from_extra("train"):
            from openhands_rl_plugin.rewards.verifier.prompt import VerifierPrompts
            from openhands_rl_plugin.training.data.demonstrations import load_tokenizer

            prompts = VerifierPrompts(load_tokenizer(self._base), self._card.max_length)
        if (prompts.yes, prompts.no) != (self._card.yes, self._card.no):
            raise TrainingError(f"{self._base} has another tokenizer than the model of the verifier {self._directory}")
        return prompts

    @cached_property
    def _judge(self) -> Judge:
        options = self._options
        if not options.base_url:
            with _LOADING:
                return _loaded(str(self._directory.resolve()), self._card.sha256, self._base)
        return ServedVerifier(
            options.base_url,
            options.served_model or self._directory.name,
            yes=self._card.yes,
            no=self._card.no,
            api_key_env=options.api_key_env,
            timeout=options.timeout,
        ).judge

    @property
    def _base(self) -> str:
        return self._options.model or self._card.model


_LOADING = threading.Lock()


@lru_cache(maxsize=2)
def _loaded(directory: str, sha256: str, base: str) -> Judge:
    """The model that all rewards with the same weights share; the newest two are kept.

    Every episode has its own reward object, and so may every search.
    """
    with from_extra("train"):
        from openhands_rl_plugin.rewards.verifier.training import VerifierModel
    return partial(asyncio.to_thread, VerifierModel(Path(directory), model=base).judge)


def forget_models() -> None:
    """Release the models that no reward uses, including the newest ones, which are otherwise kept."""
    _loaded.cache_clear()


AT_ONCE = 16
"""Concurrent requests: enough for the server to batch them and to use its prefix cache."""

_TOP = 20  # the largest number of logprobs that vLLM returns by default (max_logprobs)


class ServedVerifier:
    """A verifier behind ``base_url`` (up to and including /v1), known there as ``model``; prompts are token ids.

    Raises ``ConfigError`` when ``api_key_env`` names a variable that is not set.
    """

    def __init__(
        self, base_url: str, model: str, *, yes: int, no: int, api_key_env: str = "", timeout: float = 120.0
    ) -> None:
        self._base_url, self._key, self._timeout = base_url, named_key(api_key_env, "api_key_env"), timeout
        self._model, self._yes, self._no = model, yes, no

    async def judge(self, prompts: Sequence[tuple[int, ...]]) -> list[VerifierOutput | Failure]:
        """One output per prompt, in order; a failed request affects its own prompt only."""
        slots = asyncio.Semaphore(AT_ONCE)
        async with aclosing(ModelServer(self._base_url, api_key=self._key, timeout=self._timeout)) as http:

            async def one(prompt: tuple[int, ...]) -> VerifierOutput | Failure:
                try:
                    async with slots:
                        with boundary(FailureKind.INFRASTRUCTURE, "verifier server"):
                            return await self._verdict(http, prompt)
                except CaughtFailure as caught:
                    return caught.failure

            # The first request fills the server's prefix cache with the common prefix.
            first = [await one(prompt) for prompt in prompts[:1]]
            return [*first, *await asyncio.gather(*map(one, prompts[1:]))]

    async def _verdict(self, http: ModelServer, prompt: tuple[int, ...]) -> VerifierOutput:
        body: JsonObject = {"model": self._model, "prompt": [*prompt], "max_tokens": 1, "temperature": 0.0}
        body |= {"logprobs": _TOP, "return_tokens_as_token_ids": True}

        def pick(answer: Any) -> list[float | None]:
            top = (answer["choices"][0].get("logprobs") or {}).get("top_logprobs") or [{}]
            return [top[0].get(f"token_id:{label}") for label in (self._yes, self._no)]

        try:
            yes, no = await http.ask("v1/completions", body, f"{self._model} cannot judge at {http.url}", pick)
        except PublishError as error:
            kind = InfrastructureError if isinstance(error.__cause__, ServerError) else ModelError
            raise kind(str(error)) from error
        if yes is None or no is None:
            raise GraderError(
                f"{self._model} names no logprobs of both labels: serve the verifier by vLLM or `openhands-rl serve`, "
                "or leave base_url out to score in this process"
            )
        return VerifierOutput(margin=yes - no, mass=min(1.0, math.exp(yes) + math.exp(no)))
