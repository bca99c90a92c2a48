"""P(success) from a trained verifier, which runs in this process or on a server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

from pydantic import Field

from openhands_rl_plugin.core.errors import GraderError, TrainingError, from_extra
from openhands_rl_plugin.core.types import Failure, Frozen, Score, Trajectory
from openhands_rl_plugin.rewards.verifier.served import ServedVerifier
from openhands_rl_plugin.training.verifier.card import VerifierCard, VerifierOutput

if TYPE_CHECKING:
    from openhands_rl_plugin.training.verifier.prompt import VerifierPrompt, VerifierPrompts
    from openhands_rl_plugin.training.verifier.train import VerifierModel


class VerifierOptions(Frozen):
    """``adapter``: a directory written by ``openhands-rl train --verifier``. ``model``: the base model's directory, if
    it has moved since training.

    With ``base_url`` (up to and including /v1) a server scores, on which the adapter has the name ``served_model``
    (default: the directory's name); ``api_key_env`` names a variable with the key, ``timeout`` is in seconds. Without
    it the model is loaded in this process, once for all rewards that use it; ``tokens_per_pass``: tokens of a
    micro-batch.
    """

    adapter: str = Field(min_length=1)
    model: str = ""
    base_url: str = ""
    served_model: str = ""
    api_key_env: str = ""
    timeout: float = Field(default=120.0, gt=0)
    tokens_per_pass: int = Field(default=16_384, ge=1)


class Judge(Protocol):
    """Scores the verifier's prompts."""

    async def judge(self, prompts: Sequence[tuple[int, ...]]) -> list[VerifierOutput | Failure]:
        """One output per prompt, in order."""
        ...


class VerifierReward:
    """Scores are P(YES) in [0, 1]. A common prefix of the prompts of one call is computed once.

    Nothing is loaded before the first episode. Raises ``ConfigError`` when the directory has no verifier.
    """

    Options = VerifierOptions

    def __init__(self, options: VerifierOptions) -> None:
        self._options = options
        self._directory = Path(options.adapter).expanduser()
        self._card = VerifierCard.load(self._directory)
        self._waiting: WeakKeyDictionary[asyncio.AbstractEventLoop, _Batch] = WeakKeyDictionary()

    @property
    def version(self) -> str:
        """Identifies the adapter's weights, and everything else that the scores depend on."""
        return self._card.version

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Score one episode; concurrent calls are batched. Raises ``GraderError``."""
        batch = self._waiting.setdefault(asyncio.get_running_loop(), _Batch(self))
        outcome = await batch.judge(trajectory)
        if isinstance(outcome, Failure):
            raise GraderError(outcome.message)
        return outcome

    async def judge_all(self, trajectories: Sequence[Trajectory]) -> list[Score | Failure]:
        """One outcome per episode, in order. Raises the error of a missing model, server or package."""
        valid = [trajectory for trajectory in trajectories if trajectory.failure is None]
        if not valid:
            return [trajectory.failure for trajectory in trajectories if trajectory.failure is not None]
        prompts = await asyncio.to_thread(lambda: [self._prompts.of(trajectory) for trajectory in valid])
        verdicts = await self._judge.judge([prompt.ids for prompt in prompts])
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
            from openhands_rl_plugin.training.verifier.prompt import VerifierPrompts, load_tokenizer

            prompts = VerifierPrompts(load_tokenizer(self._base), self._card.max_length)
        if (prompts.yes, prompts.no) != (self._card.yes, self._card.no):
            raise TrainingError(f"{self._base} has another tokenizer than the model of the verifier {self._directory}")
        return prompts

    @cached_property
    def _judge(self) -> Judge:
        options = self._options
        if not options.base_url:
            return _Here.of(self._directory, self._card.sha256, self._base, options.tokens_per_pass)
        return ServedVerifier(
            options.base_url,
            options.served_model or self._directory.name,
            yes=self._card.yes,
            no=self._card.no,
            api_key_env=options.api_key_env,
            timeout=options.timeout,
        )

    @property
    def _base(self) -> str:
        return self._options.model or self._card.model


def forget_models() -> None:
    """Release the models that no reward uses, including the newest one, which is otherwise kept."""
    _Here.forget()


class _Asked:
    """Prompts that wait for their outputs."""

    def __init__(self, prompts: Sequence[tuple[int, ...]]) -> None:
        self.prompts = prompts
        self.verdicts: list[VerifierOutput] | None = None


class _Here:
    """A model in this process, loaded at the first call. All waiting prompts are scored in one batch.

    It may be called from any thread and any event loop.
    """

    _shared: ClassVar[WeakValueDictionary[tuple[str, ...], _Here]] = WeakValueDictionary()
    _newest: ClassVar[_Here | None] = None
    _sharing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, directory: Path, base: str, tokens_per_pass: int) -> None:
        self._directory = directory
        self._base = base
        self._tokens_per_pass = tokens_per_pass
        self._turn = threading.Lock()
        self._waiting: set[_Asked] = set()

    @classmethod
    def of(cls, directory: Path, sha256: str, base: str, tokens_per_pass: int) -> _Here:
        """The instance that all rewards with the same weights share.

        Every episode has its own reward object, so the newest model is kept for the next one.
        """
        key = (str(directory.resolve()), sha256, base, str(tokens_per_pass))
        with cls._sharing:
            here = cls._shared.get(key) or cls(directory, base, tokens_per_pass)
            cls._shared[key] = cls._newest = here
            return here

    @classmethod
    def forget(cls) -> None:
        """Do not keep the newest model for later rewards."""
        with cls._sharing:
            cls._newest = None

    async def judge(self, prompts: Sequence[tuple[int, ...]]) -> list[VerifierOutput | Failure]:
        asked = _Asked(prompts)
        self._waiting.add(asked)
        try:
            return [*await asyncio.to_thread(self._answer, asked)]
        finally:
            self._waiting.discard(asked)

    def _answer(self, asked: _Asked) -> list[VerifierOutput]:
        with self._turn:
            if asked.verdicts is None:
                model = self._model
                together = [each for each in {*self._waiting, asked} if each.verdicts is None]
                verdicts = iter(model.judge([prompt for each in together for prompt in each.prompts]))
                for each in together:
                    each.verdicts = list(islice(verdicts, len(each.prompts)))
            assert asked.verdicts is not None
            return asked.verdicts

    @cached_property
    def _model(self) -> VerifierModel:
        with from_extra("train"):
            from openhands_rl_plugin.training.verifier.train import VerifierModel
        return VerifierModel(self._directory, model=self._base, tokens_per_pass=self._tokens_per_pass)


class _Batch:
    """The episodes of one event loop that wait to be scored in one batch."""

    def __init__(self, reward: VerifierReward) -> None:
        self._reward = reward
        self._waiting: list[Trajectory] = []
        self._task: asyncio.Task[list[Score | Failure]] | None = None

    async def judge(self, trajectory: Trajectory) -> Score | Failure:
        """The outcome of one episode."""
        if self._task is None:
            self._task = asyncio.create_task(self._judge())
        at, task = len(self._waiting), self._task
        self._waiting.append(trajectory)
        # Shielded: one cancelled caller must not cancel the scoring of the others.
        return (await asyncio.shield(task))[at]

    async def _judge(self) -> list[Score | Failure]:
        await asyncio.sleep(0)
        waiting, self._waiting, self._task = self._waiting, [], None
        return await self._reward.judge_all(waiting)
