"""``RLAgent``, the Python API: a policy that rolls out, learns and saves, over any environment and engine."""

from __future__ import annotations

import asyncio
import random
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, Self, TypedDict

from pydantic import ValidationError

from openhands_rl_plugin.config.build import (
    make_engine,
    make_environment,
    make_reward,
    make_strategy,
    open_storage,
    strategy_spec,
)
from openhands_rl_plugin.config.rl import AUTO, RLSettings
from openhands_rl_plugin.core.concurrency import LoopThread
from openhands_rl_plugin.core.errors import ConfigError, describe, from_extra
from openhands_rl_plugin.core.messages import transcript_nodes
from openhands_rl_plugin.core.protocols import LLMEngine
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.types import (
    Adapter,
    EpisodeRequest,
    Failure,
    Limits,
    PolicyRef,
    Probe,
    Score,
    Task,
    Trajectory,
)
from openhands_rl_plugin.models.adapters.publisher import publisher_for
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.engines.client import (
    OpenAIEngine,
    SeededEngine,
    local_weights,
    served_base,
    with_version,
)
from openhands_rl_plugin.models.generator.config import ServerConfig, server_options
from openhands_rl_plugin.rollout.episode import SessionRunner
from openhands_rl_plugin.rollout.many import RolloutPlan, roll_out
from openhands_rl_plugin.rollout.scoring import judge_all, refuse_without_workspace
from openhands_rl_plugin.training.data.dataset import TrainReport
from openhands_rl_plugin.training.learn import TrainingJob, policy_dataset, train_policy
from openhands_rl_plugin.trajectories.view import progress_bar


class Policy:
    """A base model and the version of its adapter that is in use, behind a server or a plugin's engine.

    ``base_model`` is its name in trajectories and manifests; ``adapter`` is ``None`` while it is sampled as it is.
    """

    def __init__(self, model: str | Path, weights: str | Path | None, settings: RLSettings) -> None:
        """``model``: a URL, whose base model's ``weights`` may be named; a directory or cached hub name, which the
        embedded server serves from this process; or a name for the engine of ``[rl] engine``, whose episodes are not
        trained here.

        Raises ``ConfigError`` when the base model is ambiguous, ``InfrastructureError`` when the server does not
        answer, ``ServingError`` for a model that cannot be served, ``MissingExtraError`` without torch.
        """
        serving, served = settings.serving, str(model).startswith(("http://", "https://"))
        # A server may have another working directory, so the paths that are sent to it must be absolute.
        self.store = AdapterStore(serving.adapters_directory.resolve())
        self.adapter: Adapter | None = None
        self.settings, self.base_model, self._asked = settings, str(model), str(model)
        self._server, self._publisher, self._url, self._weights = ExitStack(), None, "", None
        if not served and settings.engine not in (AUTO, "transformers"):
            return
        with ExitStack() as opened:
            if served:
                url, self._weights = str(model), local_weights(weights) if weights else None
            else:
                with from_extra("train"):
                    from openhands_rl_plugin.models.server.app import running_server
                self._weights = folder = local_weights(model) or Path(model)
                config = ServerConfig.model_validate({"port": 0, **server_options(settings, str(folder))})
                url = opened.enter_context(running_server(config))
                serving = serving.model_copy(update={"model": str(folder), "api_key_env": ""})
                self.settings = settings.model_copy(update={"serving": serving, "engine": AUTO})
            self._url = with_version(url)
            base = served_base(self._url, serving.model, serving.api_key(), serving.request_timeout)
            self.base_model, self._asked, self._weights = base.id, base.id, self._weights or base.weights
            # Versions that stay loaded while a new one is checked.
            keep, reached = max(1, serving.max_adapters - 1), serving.model_copy(update={"base_url": self._url})
            self._publisher = publisher_for(reached, self.store, keep=keep)
            self._server = opened.pop_all()

    @property
    def served_model(self) -> str:
        """The model name to request."""
        return self.base_model if self.adapter is None else self._asked

    async def resume(self) -> None:
        """Use the version that the store's pointer names, if it belongs to this base model."""
        current = self.store.current(self.settings.serving.adapter)
        if self._publisher is not None and current is not None and current.base_model == self.base_model:
            await self.adopt(current)

    async def adopt(self, adapter: Adapter, probe: Probe | None = None) -> None:
        """Sample from ``adapter`` from now on; its logprobs are checked against ``probe`` first.

        Raises ``PublishError``; the previous version then stays in use.
        """
        assert self._publisher is not None, "without a server nothing is trained"
        await self._publisher.publish(adapter, probe)
        self._asked = await self._publisher.served_model(adapter)
        self.adapter = adapter

    def engine(self) -> LLMEngine:
        """Completions from the version in use; the caller closes it, if it has ``aclose``."""
        settings, serving = self.settings, self.settings.serving
        if settings.engine == AUTO:
            key, timeout = serving.api_key(), serving.request_timeout
            return OpenAIEngine(self.served_model, self._url, key, base_model=self.base_model, timeout=timeout)
        return make_engine(settings, model=self.served_model, base_model=self.base_model, base_url=self._url)

    def training_weights(self) -> str:
        """The base model's directory or cached name, to train on. Raises ``ConfigError`` when it is not known."""
        if self._publisher is None:
            raise ConfigError(
                f"[rl] engine: no adapter can be given to {self.settings.engine!r}; train its episodes with "
                "`openhands-rl train`, or pass the URL of a server as the model"
            )
        if self._weights is None:
            raise ConfigError(
                f"the weights of {self.base_model!r} are not on this machine (its server names no local directory as "
                "root): pass the model's directory, RLAgent(model=url, tokenizer='path/to/model')"
            )
        return str(self._weights)

    async def close(self) -> None:
        """Close the connections and stop the server that was started here; another one and its adapters stay."""
        if self._publisher is not None:
            await self._publisher.aclose()
        await asyncio.to_thread(self._server.close)


# The range of an episode's seed: far larger than the number of completions of a call, whose seeds are consecutive.
_SEEDS = 2**31

ConversationMessage = TypedDict(
    "ConversationMessage", {"from": Literal["human", "gpt"], "value": str, "loss": bool | None}
)
"""A message in AgentGym's form; ``loss`` is true for sampled messages and ``None`` for all others."""


class EpisodeResult(TypedDict):
    """One episode of ``RLAgent.run``.

    ``reward`` is that of ``[rl.reward]`` (default: the return), or ``None`` when there is no valid one; then
    ``failure`` says why. ``text`` is the whole conversation. ``trajectory_id`` is its id in the storage.
    """

    conversation: list[ConversationMessage]
    reward: float | None
    text: str
    trajectory_id: str
    task_id: str
    stop: str
    failure: str | None


def result_of(trajectory: Trajectory, outcome: Score | Failure) -> EpisodeResult:
    """An episode and its score in the caller's form."""
    conversation: list[ConversationMessage] = []
    for node in (trajectory.nodes[index] for index in transcript_nodes(trajectory)):
        answers = node.message.role == "assistant"
        loss = node.sampled if answers else None
        conversation.append({"from": "gpt" if answers else "human", "value": node.message.content or "", "loss": loss})
    speakers = {"human": "Human", "gpt": "Assistant"}
    return EpisodeResult(
        conversation=conversation,
        reward=outcome.reward if isinstance(outcome, Score) else None,
        text="".join(f"\n{speakers[message['from']]}: {message['value']}" for message in conversation),
        trajectory_id=trajectory.id,
        task_id=trajectory.task.id,
        stop=trajectory.stop.value,
        failure=f"{outcome.kind.value}: {outcome.message}" if isinstance(outcome, Failure) else None,
    )


_LOG = redacting_logger(__name__)


class RLAgent:
    """The Python API: runs episodes and trains on them, without OpenHands. This is ``openhands_rl_plugin.RLAgent``.

    The agent of the same name that OpenHands loads (``agent = "RLAgent"``) is the one of ``hosts/v0/agent.py``.

    Args:
        model: a model's directory (or cached hub name); the URL of an OpenAI-compatible endpoint
            (``"http://127.0.0.1:8100/v1"``); or any name that the engine of ``[rl] engine`` knows.
        tokenizer: with an endpoint, the directory of the model's weights, to train where the server does not report
            one.
        config: the ``[rl]`` section of ``config.toml``; default: all defaults.

    An agent resumes the latest version of ``[rl.serving] adapter`` if that was trained on the same base model.
    All methods are synchronous and may be called from anywhere, from inside a running event loop too; calls from
    several threads wait for each other. ``close()``, or the end of a ``with`` block, releases what was started.

    Raises ``ConfigError`` and other ``RLError`` whose first line names the cause and the remedy.
    """

    def __init__(
        self,
        model: str | Path,
        tokenizer: str | Path | None = None,
        config: RLSettings | None = None,
    ) -> None:
        self.config = config or RLSettings()
        make_environment(self.config)
        make_strategy(self.config)
        self.config.training.check_servable()
        self._reward = make_reward(self.config.reward)
        refuse_without_workspace(self._reward, "RLAgent runs environments, which have none")
        self._storage = open_storage(self.config)
        self._policy = Policy(model, tokenizer, self.config)
        self._thread = LoopThread("rl-agent")
        self._one_call = threading.Lock()
        self._closed = False
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
        batch_size: int = 1,
        split: str = "",
    ) -> list[EpisodeResult]:
        """Run and store episodes, up to ``config.max_workers`` at once; return one result per episode, in the order of
        ``task_indices``.

        Args:
            task_description: the instruction, in the first prompt of every episode.
            max_rounds: maximum turns of an episode; default: ``config.max_turns``.
            task_indices: indices of the environment's tasks; default: the first one.
            batch_size: episodes per task (the group size); training compares them, so use 4 or more.
            split: of the tasks; ``train`` never learns from ``"heldout"``.

        A failed episode is part of the result, with ``failure`` set and ``reward`` ``None``. Raises ``StorageError``
        when an episode cannot be stored, ``ConfigError`` for invalid arguments.
        """
        tasks = self._tasks(task_description, [0] if task_indices is None else task_indices, split)
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
                concurrency=self.config.max_workers,
            )
            return self._thread.wait_for(self._play(plan, limits))

    def train(
        self,
        learning_rate: float | None = None,
        num_epochs: int | None = None,
        batch_size: int | None = None,
        task_id: int | str | None = None,
    ) -> TrainReport:
        """Train on this policy's stored episodes of ``config.env_name``, and sample from the new adapter from now on.

        Uses ``[rl.training] algorithm`` (default: REINFORCE++ with a group baseline, which needs tasks whose episodes
        differ in reward) on the recorded token ids. The reward is that of ``[rl.reward]`` (default: the return); stored
        scores of its version are used. Arguments that are left out are taken from ``config.training``.

        Args:
            learning_rate: AdamW's learning rate.
            num_epochs: passes over the episodes.
            batch_size: episodes per optimiser step.
            task_id: use only the episodes of this task: its index, or the ``task_id`` of a result.

        Raises ``TrainingError`` when no stored episode can be trained on, ``ConfigError`` when the weights of an
        endpoint's model are not on this machine, ``PublishError`` when the served adapter's logprobs differ from the
        trainer's; the previous adapter then stays in use.
        """
        given = {"learning_rate": learning_rate, "num_epochs": num_epochs, "batch_size": batch_size}
        own = self.config.training.model_dump() | {name: value for name, value in given.items() if value is not None}
        settings = RLSettings.model_validate({"training": own}).training
        environment = self.config.env_name
        chosen = f"{environment}-{task_id}" if isinstance(task_id, int) else task_id
        where = TrajectoryFilter(environment=environment, task_id=chosen)
        with self._working():
            job = TrainingJob(
                settings=self.config.model_copy(update={"training": settings}),
                model=Path(self._policy.training_weights()),
                adapters=self._policy.store,
                name=self.config.serving.adapter,
                base_model=self._policy.base_model,
                parent=self._policy.adapter,
            )
            dataset = self._thread.wait_for(policy_dataset(job, self._storage, where))
            for warning in dataset.warnings():
                _LOG.warning("%s", warning)
            adapter, probe = train_policy(job, dataset, on_note=lambda line: _LOG.warning("%s", line))
            assert adapter is not None  # this is the only process
            self._thread.wait_for(self._policy.adopt(adapter, probe))
        used = {"used": dataset.used, "excluded": dataset.excluded, "metrics": adapter.metrics}
        return TrainReport(algorithm=dataset.algorithm, adapter=adapter, **used)

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

    def __exit__(self, *ended: object) -> None:
        self.close()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """One call at a time: the adapter must not change while episodes run."""
        with self._one_call:
            if self._closed:
                raise RuntimeError("the agent is closed")
            yield

    async def _play(self, plan: RolloutPlan, limits: Limits) -> list[EpisodeResult]:
        engine, config, storage = self._policy.engine(), self.config, self._storage
        seed = f"{config.sampling.seed}/{self._runs}"

        def engine_for(request: EpisodeRequest) -> SeededEngine:
            # Not the request's own seed: that one depends on the run's id, which differs in every run.
            key = f"{seed}/{request.task.id}/{request.sample}/{request.attempt}"
            return SeededEngine(engine, config.sampling_params(), random.Random(key).randrange(_SEEDS))

        try:
            runner = SessionRunner(
                make_environment=lambda request: make_environment(config),
                make_strategy=lambda request: make_strategy(config),
                make_engine=engine_for,
                strategy_spec=strategy_spec(config),
                base_model=self._policy.base_model,
                limits=limits,
                storage=storage,
            )
            total = len(plan.tasks) * plan.samples_per_task
            with progress_bar("episodes", total) as bar:
                finished = await roll_out(plan, runner, storage, on_finished=lambda _: bar.advance())
        finally:
            if (close := getattr(engine, "aclose", None)) is not None:
                await close()
        outcomes = await judge_all(self._reward, finished)
        await storage.add_scores([outcome for outcome in outcomes if isinstance(outcome, Score)])
        return [result_of(trajectory, outcome) for trajectory, outcome in zip(finished, outcomes, strict=True)]

    def _tasks(self, instruction: str, indices: Sequence[int], split: str) -> tuple[Task, ...]:
        name = self.config.env_name
        if len(set(indices)) < len(indices):
            raise ConfigError("task_indices contains a task twice: repeat a task with batch_size")
        try:
            return tuple(
                Task(id=f"{name}-{each}", environment=name, instruction=instruction, data={"idx": each}, split=split)
                for each in indices
            )
        except ValidationError as error:
            raise ConfigError(describe(error)) from error
