"""``RLAgent``: runs episodes and trains on them, in two calls.

with RLAgent(model="path/to/model", config=RLAgentConfig(max_turns=5, env_name="webshop")) as agent:
    episodes = agent.run("Buy what the page asks for.", task_indices=[0, 1, 2], batch_size=8)
    report = agent.train(learning_rate=1e-4)     # the next run samples from report.adapter
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

from pydantic import JsonValue, ValidationError

from openhands_rl_plugin.apps.agent.episodes import ConversationMessage, EpisodeResult, result_of, session_runner
from openhands_rl_plugin.apps.agent.policies import ClosableEngine, open_policy
from openhands_rl_plugin.config.build import make_environment, make_reward, make_strategy, open_storage
from openhands_rl_plugin.config.rl import RLSettings, TrainingSettings
from openhands_rl_plugin.core.concurrency import LoopThread
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, MissingExtraError, boundary, problems
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.types import Adapter, FailureKind, Limits, PolicyRef, Score, Task
from openhands_rl_plugin.rollout.many import RolloutPlan, roll_out
from openhands_rl_plugin.rollout.scoring import judge_all, refuse_without_workspace
from openhands_rl_plugin.training.data.dataset import (
    ExcludedEpisodes,
    TrainReport,
    build_dataset_or_sft,
    load_episodes,
)
from openhands_rl_plugin.training.learn import learn, tell_notes
from openhands_rl_plugin.trajectories.view.terminal import progress_bar

if TYPE_CHECKING:
    from openhands_rl_plugin.training.trainer.local_trainer import LoraTrainer

__all__ = ["ConversationMessage", "EpisodeResult", "ExcludedEpisodes", "RLAgent", "TrainReport"]

_LOG = redacting_logger(__name__)


class RLAgent:
    """The Python API: runs episodes and trains on them, without OpenHands. This is ``openhands_rl_plugin.RLAgent``.

    The agent of the same name that OpenHands loads (``agent = "RLAgent"``) is the one of ``hosts/v0/agent.py``.

    Args:
        model: a transformers model object; a model's directory (or cached hub name); the URL of an OpenAI-compatible
            endpoint (``"http://127.0.0.1:8100/v1"``); or any name that the engine of ``[rl] engine`` knows. An object
            is written once below ``[rl.serving] adapters_path``, and served and trained from there: an adapter is
            bound to exact weights, and an object may change.
        tokenizer: needed with a model object. With an endpoint: the directory of the model's weights, to train where
            the server does not report one.
        config: the ``[rl]`` section of ``config.toml``; default: all defaults.
        progress: show bars of episodes and of optimiser steps on stderr, if that is a terminal.

    An agent resumes the latest version of ``[rl.serving] adapter`` if that was trained on the same base model.
    All methods are synchronous and may be called from anywhere, from inside a running event loop too; calls from
    several threads wait for each other. ``close()``, or the end of a ``with`` block, releases what was started.

    Raises ``ConfigError`` and other ``RLError`` whose first line names the cause and the remedy.
    """

    def __init__(
        self, model: object, tokenizer: object = None, config: RLSettings | None = None, *, progress: bool = True
    ) -> None:
        self.config = config or RLSettings()
        make_environment(self.config)
        make_strategy(self.config)
        self.config.training.check_servable()
        self._reward = make_reward(self.config.reward)
        refuse_without_workspace(self._reward, "RLAgent plays environments, which have none")
        self._storage = open_storage(self.config)
        self._policy = open_policy(model, tokenizer, self.config)
        self._thread = LoopThread("rl-agent")
        self._one_call = threading.Lock()
        self._closed = False
        self._progress = progress
        self._runs = 0
        try:
            self._thread.wait_for(self._policy.resume())
        except BaseException:
            self.close()
            raise

    @property
    def policy(self) -> PolicyRef:
        """The weights that the next episode samples from."""
        return PolicyRef.from_served_name(self._policy.base_model, self._policy.served_model)

    @property
    def adapter(self) -> Adapter | None:
        """The adapter in use; ``None`` while the base model is sampled as it is."""
        return self._policy.adapter

    def run(
        self,
        task_description: str = "",
        max_rounds: int | None = None,
        task_indices: Sequence[int] | None = None,
        parallel: bool = True,
        batch_size: int = 1,
        metadata: Mapping[str, JsonValue] | None = None,
        split: str = "",
    ) -> list[EpisodeResult]:
        """Run and store episodes; return one result per episode, in the order of ``task_indices``.

        Args:
            task_description: the instruction, in the first prompt of every episode.
            max_rounds: maximum turns of an episode; default: ``config.max_turns``.
            task_indices: indices of the environment's tasks; default: the first one.
            parallel: run up to ``config.max_workers`` episodes concurrently, else one after another.
            batch_size: episodes per task (the group size); training compares them, so use 4 or more.
            metadata: kept with the stored tasks.
            split: of the tasks; ``train`` never learns from ``"heldout"``.

        A failed episode is part of the result, with ``failure`` set and ``reward`` ``None``. Raises ``StorageError``
        when an episode cannot be stored, ``ConfigError`` for invalid arguments.
        """
        tasks = self._tasks(task_description, [0] if task_indices is None else task_indices, metadata, split)
        for name, value in (("batch_size", batch_size), ("max_rounds", 1 if max_rounds is None else max_rounds)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if not tasks:
            return []
        limits = self.config.limits()
        if max_rounds is not None:
            limits = limits.model_copy(update={"max_turns": max_rounds})
        with self._working():
            self._runs += 1
            plan = RolloutPlan(
                run_id=f"agent-{uuid.uuid4().hex}",
                tasks=tasks,
                samples_per_task=batch_size,
                served_model=self._policy.served_model,
                concurrency=self.config.max_workers if parallel else 1,
            )
            return self._thread.wait_for(self._play(plan, limits))

    def train(
        self,
        learning_rate: float | None = None,
        num_epochs: int | None = None,
        batch_size: int | None = None,
        max_grad_norm: float | None = None,
        env_name: str | None = None,
        task_id: int | str | None = None,
    ) -> TrainReport:
        """Train on this policy's stored episodes, and sample from the new adapter from now on.

        Uses ``[rl.training] algorithm`` (default: REINFORCE++ with a group baseline) on the recorded token ids if
        episodes of one task differ in reward; else supervised fine-tuning on the episodes with a positive reward. The
        reward is that of ``[rl.reward]`` (default: the return); stored scores of its version are used. Arguments that
        are left out are taken from ``config.training`` (1e-5, 3 epochs, 8 episodes per step, 1.0).

        Args:
            learning_rate: AdamW's learning rate.
            num_epochs: passes over the episodes.
            batch_size: episodes per optimiser step.
            max_grad_norm: the norm that gradients are clipped to.
            env_name: use only this environment's episodes; default: ``config.env_name``.
            task_id: use only the episodes of this task: its index, or the ``task_id`` of a result.

        Raises ``TrainingError`` when no stored episode can be trained on, ``ConfigError`` when the weights of an
        endpoint's model are not on this machine, ``PublishError`` when the served adapter's logprobs differ from the
        trainer's; the previous adapter then stays in use.
        """
        given = {
            "learning_rate": learning_rate,
            "num_epochs": num_epochs,
            "batch_size": batch_size,
            "max_grad_norm": max_grad_norm,
        }
        settings = _overridden(
            self.config.training, {name: value for name, value in given.items() if value is not None}
        )
        weights = self._policy.training_weights()
        environment = env_name or self.config.env_name
        chosen = task_id_of(environment, task_id) if isinstance(task_id, int) else task_id
        where = TrajectoryFilter(environment=environment, task_id=chosen)
        with self._working():
            collecting = load_episodes(
                self._storage,
                where,
                base_model=self._policy.base_model,
                adapter=self.config.serving.adapter,
                reward=self._reward,
            )
            episodes = self._thread.wait_for(collecting)
            dataset = build_dataset_or_sft(episodes, settings)
            for warning in dataset.warnings():
                _LOG.warning("%s", warning)
            trainer = _trainer(weights, settings, self._policy.adapter)
            with progress_bar("optimiser steps", shown=self._progress) as bar:
                notes = tell_notes(trainer, bar.print if bar.drawn else _LOG.info)
                metrics, adapter, probe = learn(
                    trainer,
                    dataset,
                    self._policy.store,
                    self.config.serving.adapter,
                    base_model=self._policy.base_model,
                    parent=self._policy.adapter,
                    on_progress=lambda at: bar.update(at.done, at.total, note=f"loss {at.loss:.3f}"),
                )
            assert adapter is not None  # this is the only process
            self._thread.wait_for(self._policy.adopt(adapter, probe))
        used = {"used": dataset.used, "excluded": dataset.excluded, "metrics": metrics.as_floats()}
        return TrainReport(algorithm=dataset.algorithm, adapter=adapter, notes=notes, **used)

    def create_prompt(self, task_description: str) -> str:
        """The first prompt of the environment's first task, as text. Opens and closes an episode for it.

        Raises ``RLError`` when the environment does not answer.
        """
        (task,) = self._tasks(task_description, [0], None)
        with self._working():
            return self._thread.wait_for(self._opening(task))

    def close(self) -> None:
        """Release the model, the connections, the storage and the thread. A given server keeps running. Idempotent."""
        with self._one_call:
            if self._closed:
                return
            self._closed = True
            try:
                self._thread.wait_for(self._policy.close())
                self._thread.wait_for(self._storage.close())
            finally:
                self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """One call at a time: the adapter must not change while episodes run."""
        with self._one_call:
            if self._closed:
                raise RuntimeError("the agent is closed")
            yield

    async def _play(self, plan: RolloutPlan, limits: Limits) -> list[EpisodeResult]:
        engine = self._policy.engine()
        seed = f"{self.config.sampling.seed}/{self._runs}"
        try:
            base_model, storage = self._policy.base_model, self._storage
            runner = session_runner(
                self.config, engine, base_model=base_model, limits=limits, seed=seed, storage=storage
            )
            total = len(plan.tasks) * plan.samples_per_task
            with progress_bar("episodes", total, shown=self._progress) as bar:
                played = await roll_out(plan, runner, storage, on_finished=lambda _: bar.advance())
        finally:
            if isinstance(engine, ClosableEngine):
                await engine.aclose()
        outcomes = await judge_all(self._reward, played)
        await self._storage.add_scores([outcome for outcome in outcomes if isinstance(outcome, Score)])
        return [result_of(trajectory, outcome) for trajectory, outcome in zip(played, outcomes, strict=True)]

    async def _opening(self, task: Task) -> str:
        environment = make_environment(self.config)
        try:
            with boundary(FailureKind.ENVIRONMENT, "environment.reset"):
                opening = await environment.reset(task)
        finally:
            # The opening is known already, so a failure of close does not matter.
            with suppress(CaughtFailure), boundary(FailureKind.INFRASTRUCTURE, "environment.close"):
                await environment.close()
        return "\n\n".join(f"{message.role}: {message.content or ''}" for message in opening.messages)

    def _tasks(
        self, instruction: str, indices: Sequence[int], metadata: Mapping[str, JsonValue] | None, split: str = ""
    ) -> tuple[Task, ...]:
        name = self.config.env_name
        if len(set(indices)) < len(indices):
            raise ConfigError("task_indices contains a task twice: repeat a task with batch_size")
        extra = {"metadata": dict(metadata)} if metadata else {}
        try:
            return tuple(
                Task(
                    id=task_id_of(name, index),
                    environment=name,
                    instruction=instruction,
                    data={"idx": index, **extra},
                    split=split,
                )
                for index in indices
            )
        except ValidationError as error:
            lines = (f"{'.'.join(at)}: {what}" for at, what in problems(error, Task))
            raise ConfigError("\n".join(lines)) from error


def task_id_of(environment: str, index: int) -> str:
    """``("webshop", 3)`` -> ``"webshop-3"``."""
    return f"{environment}-{index}"


def _overridden(settings: TrainingSettings, given: Mapping[str, float]) -> TrainingSettings:
    try:
        return TrainingSettings.model_validate({**settings.model_dump(), **given})
    except ValidationError as error:
        raise ConfigError(
            "\n".join(f"{'.'.join(at)}: {what}" for at, what in problems(error, TrainingSettings))
        ) from error


def _trainer(weights: str, settings: TrainingSettings, adapter: Adapter | None) -> LoraTrainer:
    try:
        from openhands_rl_plugin.training.trainer.local_trainer import LoraTrainer
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "train") from error
    return LoraTrainer(weights, settings, adapter=adapter)
