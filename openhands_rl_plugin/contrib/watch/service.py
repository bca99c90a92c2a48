"""The service: from where the journal stands, one step after the other, each of which may be repeated."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.apps.loop.run import LoopJob
from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.contrib.watch.gates import (
    Unmeasured,
    Verdict,
    digest_of,
    held_out_gate,
    play_suite,
    safety_gate,
)
from openhands_rl_plugin.contrib.watch.gathering import (
    EpisodeJudge,
    Judged,
    Material,
    candidates,
    chain,
    dataset_of,
    material,
    training_for,
)
from openhands_rl_plugin.contrib.watch.journal import (
    CANARY,
    HELD_OUT,
    SAFETY,
    Entry,
    Journal,
    Round,
    State,
    WatchStep,
    is_paused,
    state_of,
)
from openhands_rl_plugin.contrib.watch.settings import WatchSettings, watch_settings
from openhands_rl_plugin.core.errors import (
    CaughtFailure,
    ConfigError,
    InfrastructureError,
    MissingExtraError,
    PublishError,
    RLError,
    StorageError,
    TrainingError,
    boundary,
)
from openhands_rl_plugin.core.judgements import labels_of, preferences
from openhands_rl_plugin.core.machine import forget_unused
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.types import Adapter, FailureKind, Frozen, JsonObject
from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.training.data.dataset import TrainingDataset
from openhands_rl_plugin.training.learn import PROBE_TOKENS, create_version, fit

if TYPE_CHECKING:
    from openhands_rl_plugin.training.trainer.metrics import TrainProgress


ROUND = "watch_round"
"""The metric of a version that says which round made it."""


def made_before(adapters: AdapterStore, name: str, current: Round) -> Adapter | None:
    """The version that a killed process wrote in this round, before it could note that."""
    found = adapters.versions(name)
    ours = [each for each in found if each.version > current.latest and each.metrics.get(ROUND) == current.number]
    return ours[0] if ours else None


def train_candidate(
    model: Path,
    settings: TrainingSettings,
    dataset: TrainingDataset,
    adapters: AdapterStore,
    name: str,
    current: Round,
    *,
    base_model: str,
    run: Path,
    on_progress: Callable[[TrainProgress], None] | None = None,
) -> Adapter:
    """Train a version of ``name`` in this thread, and keep its probe; a killed call resumes in ``run``.

    Raises ``TrainingError``, ``StorageError`` and ``CaughtFailure`` for what a library raises, such as too little
    memory.
    """
    try:
        from openhands_rl_plugin.training.trainer.local_trainer import LoraTrainer
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "train") from error
    if not dataset.samples:
        raise TrainingError(f"nothing to train on; left out: {dataset.excluded.in_words()}")
    parent = adapters.get(current.parent) if current.parent is not None else None
    made = made_before(adapters, name, current)
    if made is not None and adapters.probe(made) is not None:
        return made
    probe_ids = dataset.samples[0].input_ids
    with boundary(FailureKind.MODEL, "training"):
        trainer = LoraTrainer(model, settings, adapter=made or parent)
        if made is not None:
            adapters.keep_probe(made, trainer.probe(probe_ids[-PROBE_TOKENS:]))
            return made
        metrics = fit(trainer, dataset, on_progress, run=run)
        adapter, _ = create_version(
            trainer,
            adapters,
            name,
            base_model=base_model,
            parent=parent,
            steps=metrics.steps,
            metrics=metrics.as_floats() | {"episodes_used": float(dataset.used), ROUND: float(current.number)},
            probe_ids=probe_ids,
        )
        trainer.finish()
    assert adapter is not None, "a watch is one process"
    del trainer
    forget_unused()
    return adapter


_DAY = 86_400.0
_GIGABYTE = 1e9


class Spent(Frozen):
    """In the last 24 hours: tokens of held-out episodes, and hours of training."""

    tokens: float
    hours: float


class OverBudget(InfrastructureError):
    """Nothing is wrong: the day's budget is spent, or the disk is too full to begin something."""


def spent(entries: Sequence[Entry], now: float) -> Spent:
    """What the journal says of the last 24 hours before ``now`` (Unix seconds)."""
    recent = [each for each in entries if each.at > now - _DAY]
    tokens = sum(_number(each, "tokens") for each in recent if each.step is WatchStep.MEASURED)
    seconds = sum(_number(each, "seconds") for each in recent if each.step is WatchStep.TRAINED)
    return Spent(tokens=tokens, hours=seconds / 3600)


def check_budget(settings: WatchSettings, entries: Sequence[Entry], place: Path) -> None:
    """Raise ``OverBudget`` where nothing that costs something may begin now; ``place``: the folder of the versions."""
    used = spent(entries, time.time())
    later = "; it goes on when less than that was spent in 24 hours"
    if settings.tokens_per_day and used.tokens >= settings.tokens_per_day:
        raise OverBudget(f"{used.tokens:,.0f} tokens of tokens_per_day = {settings.tokens_per_day:,} are spent{later}")
    if settings.hours_per_day and used.hours >= settings.hours_per_day:
        raise OverBudget(f"{used.hours:.2f} hours of hours_per_day = {settings.hours_per_day:g} are spent{later}")
    free = shutil.disk_usage(place if place.exists() else place.parent).free / _GIGABYTE
    if free < settings.min_free_gb:
        raise OverBudget(f"{free:.1f} GB are free at {place}, min_free_gb = {settings.min_free_gb:g}: free some space")


def remove_older(settings: WatchSettings, state: State, adapters: AdapterStore, name: str) -> tuple[str, ...]:
    """Remove versions that the watch made, all but the newest ``keep_versions``, the one in use and the last ones that
    were admitted, to which a rollback may go. Returns the names. Raises ``StorageError``."""
    current = adapters.current(name)
    kept = {*state.admitted[-settings.keep_versions :], *([current.name] if current is not None else [])}
    kept |= {state.round.candidate, state.round.parent or ""} if state.round is not None else set()
    made = [each for each in adapters.versions(name) if ROUND in each.metrics]
    gone: list[str] = []
    for each in made[: -settings.keep_versions]:
        if each.name not in kept:
            adapters.remove(each.name)
            gone.append(each.name)
    return tuple(gone)


def remove_training(folder: Path, number: int) -> None:
    """Remove checkpoints and metrics of a round that is over. Raises ``StorageError``."""
    try:
        shutil.rmtree(training_folder(folder, number))
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(f"{training_folder(folder, number)} cannot be removed: {error}") from error


def training_folder(folder: Path, number: int) -> Path:
    """Where a round's training keeps its checkpoints."""
    return folder / "training" / f"round-{number:04d}"


def _number(entry: Entry, name: str) -> float:
    value = entry.figures.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


log = redacting_logger(__name__)

TRAINING = "training"
_MOST_TRIES = 3
"""Of one training; what fails in the same way three times is no passing trouble."""
_LONGEST_WAIT = 3600.0
_REPEATED_AFTER = 3600.0
"""Seconds after which the same trouble is noted again."""


class _Paused(RLError):
    """The pause file appeared in the middle of a training, which goes on from its last checkpoint."""


class Watch:
    """One adapter's watch. ``job``: the held-out tasks, the model's weights, the servers, and the folder of the state.

    ``say`` hears of every step.
    """

    def __init__(
        self,
        job: LoopJob,
        storage: TrajectoryStorage,
        adapters: AdapterStore,
        publisher: AdapterPublisher,
        say: Callable[[Entry], None] = lambda entry: None,
    ) -> None:
        self._job = job
        self._settings = job.settings
        self._name = job.settings.serving.adapter
        self._storage = storage
        self._adapters = adapters
        self._publisher = publisher
        self._journal = Journal(job.directory)
        self._measured = {(entry.task.environment, entry.task.id) for entry in job.tasks.held_out}
        self._judge = EpisodeJudge(job.settings, storage)
        self._say = say
        self._fruitless: int | None = None
        """What was judged when there was nothing to train on; the same again is not read again."""

    def check(self) -> None:
        """Freeze the held-out suite, or raise ``ConfigError`` where it is another than before."""
        digest, state = digest_of(self._job.tasks), state_of(self._journal.read())
        if not state.suite:
            count = len(self._job.tasks.held_out)
            said = f"the held-out suite is {count} tasks of {self._job.tasks.suite.name} from now on"
            self._note(WatchStep.FROZEN, said, figures={"digest": digest, "tasks": count})
        elif state.suite != digest:
            raise ConfigError(
                "[rl.watch] suite: its tasks are others than those that former versions were measured on, so nothing "
                f"could be compared: set it back, or move {self._journal.folder} away to begin anew"
            )

    async def run(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Look at the store every ``interval`` seconds until ``stopped``; trouble is noted and waited out."""
        while not stopped():
            try:
                await self.look()
            except StorageError as error:
                log.warning("%s", error)  # the journal itself takes no line: the disk is full, or away
            tries = state_of(self._journal.read()).tries
            await asyncio.sleep(min(_LONGEST_WAIT, watch_settings(self._settings).interval * 2 ** min(tries, 10)))

    async def look(self) -> bool:
        """Do all that can be done now; whether nothing went wrong. Raises ``StorageError`` of the journal itself."""
        while not is_paused(self._journal.folder):
            state = state_of(self._journal.read())
            try:
                if not await self._advance(state):
                    return True
            except _Paused:
                return True
            except RLError as error:
                self._could_not(state, error)
                return False
        return True

    async def _advance(self, state: State) -> bool:
        """One step; false where there is nothing to do now."""
        if (current := state.round) is None:
            return await self._begin(state)
        if not current.candidate:
            return await self._train(state, current)
        candidate = self._adapters.get(current.candidate)
        if CANARY not in current.passed:
            return await self._canary(current, candidate)
        for version in dict.fromkeys((self._in_use(), candidate.name)):
            if version not in state.measured:
                return await self._measure(state, current, version)
        if HELD_OUT not in current.passed:
            return await self._decide(current, candidate, self._held_out(state, candidate))
        if SAFETY not in current.passed:
            return await self._decide(current, candidate, self._safety(state, candidate))
        return await self._admit(current, candidate)

    async def _begin(self, state: State) -> bool:
        self._tidy(state)
        lineage = chain(self._adapters, self._in_use() or None)
        ids = await candidates(self._storage, self._settings, state, lineage, self._measured)
        judged = await self._judge.judge(ids)
        preferred = preferences(await labels_of(self._storage, ids))
        said = judged.known.keys() | {name for both in preferred for name in both}
        new, needed = len(said - state.seen), watch_settings(self._settings).min_episodes
        found, missing = None, f"{new} new ones of {needed} that are needed"
        there = hash((frozenset(judged.known.items()), frozenset(preferred.items())))
        if new >= needed and there == self._fruitless:
            missing = str(state.judged.get("missing"))
        elif new >= needed:
            found, missing = await material(self._storage, self._settings, judged.known, preferred, lineage)
        self._note_judged(state, judged, new, missing)
        if found is not None:
            return self._gather(state, found, said)
        self._fruitless = there
        if judged.away:
            raise InfrastructureError(f"episodes wait, because their judge is away: {judged.away}")
        return False

    def _gather(self, state: State, found: Material, said: Collection[str]) -> bool:
        latest = self._adapters.latest(self._name)
        figures: JsonObject = {
            "algorithm": found.settings.algorithm,
            "parent": self._in_use() or None,
            "latest": latest.version if latest is not None else 0,
            "episodes": {**found.episodes},
            "others": [*sorted(each for each in said if each not in found.episodes)],
        }
        number = state.rounds + 1
        begins = f"round {number} begins from {self._in_use() or 'the base model'}: {found.because}"
        self._note(WatchStep.GATHERED, begins, round=number, figures=figures)
        return True

    async def _train(self, state: State, current: Round) -> bool:
        self._check_budget()
        settings = training_for(self._settings.training, current.algorithm)
        dataset = await dataset_of(self._storage, self._settings, settings, current.episodes)

        def advanced(_: object) -> None:
            if is_paused(self._journal.folder):
                raise _Paused

        train = partial(
            train_candidate,
            self._job.model,
            settings,
            dataset,
            self._adapters,
            self._name,
            current,
            base_model=self._settings.serving.model,
            run=training_folder(self._journal.folder, current.number),
            on_progress=advanced,
        )
        started = time.monotonic()
        try:
            adapter = await asyncio.to_thread(train)
        except (TrainingError, CaughtFailure) as error:
            if state.failures + 1 < _MOST_TRIES:
                raise
            said = f"round {current.number} ends: its training failed {_MOST_TRIES} times: {error}"
            self._note(WatchStep.HELD, said, round=current.number, figures={"gate": TRAINING})
            return True
        said = f"{adapter.name} was trained on {dataset.used} episodes by {dataset.algorithm}"
        figures: JsonObject = {**adapter.metrics, "seconds": time.monotonic() - started}
        self._note(WatchStep.TRAINED, said, round=current.number, adapter=adapter.name, figures=figures)
        return True

    async def _canary(self, current: Round, candidate: Adapter) -> bool:
        await self._publisher.require_servers()  # servers that are away are no reason to refuse a candidate
        try:
            difference = await self._publisher.stage(candidate)
        except PublishError as error:
            await self._publisher.loaded()  # raises where they went away meanwhile
            verdict = Verdict(CANARY, False, f"{candidate.name} was held back by the canary: {error}", {"gate": CANARY})
        else:
            nats = "" if difference is None else f", {difference:.4f} nats from the trainer's logprobs"
            said = f"{candidate.name} passed the canary: every server loaded it and answers with it{nats}"
            verdict = Verdict(CANARY, True, said, {"gate": CANARY, "difference": difference})
        return await self._decide(current, candidate, verdict)

    async def _measure(self, state: State, current: Round, version: str) -> bool:
        self._check_budget()
        served = await self._served(version)
        run_id = f"{self._job.run_id}/heldout/{version or 'base'}/{state.restarts}"
        attempts = watch_settings(self._settings).attempts
        played = await play_suite(self._job, self._storage, run_id=run_id, served_model=served, attempts=attempts)
        said = f"{version or 'the base model'} succeeds in {played.figures['mean']:.3f} of {len(played.success)} tasks"
        figures: JsonObject = {**played.figures, "success": {**played.success}}
        self._note(WatchStep.MEASURED, said, round=current.number, adapter=version, figures=figures)
        return True

    def _check_budget(self) -> None:
        check_budget(watch_settings(self._settings), self._journal.read(), self._adapters.root)

    def _tidy(self, state: State) -> None:
        """Remove what no round needs any more; what cannot be removed is told, and stays."""
        try:
            remove_training(self._journal.folder, state.rounds)
            if gone := remove_older(watch_settings(self._settings), state, self._adapters, self._name):
                log.info("removed %s", ", ".join(gone))
        except StorageError as error:
            log.warning("%s", error)

    async def _served(self, version: str) -> str:
        """The model's name for a completion, of a version that is loaded now; the base model's for none."""
        if not version:
            return self._settings.serving.model
        adapter = self._adapters.get(version)
        await self._publisher.stage(adapter)  # a server may have been started anew since
        return await self._publisher.served_model(adapter)

    def _held_out(self, state: State, candidate: Adapter) -> Verdict:
        used = self._in_use()
        standing = [state.measured[name] for name in ("", *state.admitted) if self._stands(state, name)]
        best = max(standing, key=lambda each: each.mean, default=state.measured[used])
        against = {each.version or "the base model": each.success for each in (state.measured[used], best)}
        after = state.measured[candidate.name].success
        return held_out_gate(candidate.name, after, against, watch_settings(self._settings).margin)

    def _safety(self, state: State, candidate: Adapter) -> Verdict:
        before, after = state.measured[self._in_use()], state.measured[candidate.name]
        watch = watch_settings(self._settings)
        return safety_gate(candidate.name, after.trouble, before.trouble, watch.margin, watch.level)

    def _stands(self, state: State, name: str) -> bool:
        return name in state.measured and name not in state.dropped

    async def _decide(self, current: Round, candidate: Adapter, verdict: Verdict) -> bool:
        if verdict.passed:
            self._note(
                WatchStep.PASSED, verdict.said, round=current.number, adapter=candidate.name, figures=verdict.figures
            )
            return True
        try:
            await self._publisher.retire(candidate.name)
        except PublishError as error:
            log.warning("%s stays loaded: %s", candidate.name, error)
        self._note(WatchStep.HELD, verdict.said, round=current.number, adapter=candidate.name, figures=verdict.figures)
        return True

    async def _admit(self, current: Round, candidate: Adapter) -> bool:
        with self._journal.alone():
            if not self._goes_on(current):
                return True
            if self._in_use() != candidate.name:
                await self._publisher.publish(candidate)
            said = f"{candidate.name} is in use"
            self._note(WatchStep.ADMITTED, said, round=current.number, adapter=candidate.name)
        return True

    def _goes_on(self, current: Round) -> bool:
        """Whether nobody rolled back meanwhile."""
        now = state_of(self._journal.read()).round
        return now is not None and now.number == current.number

    def _note_judged(self, state: State, judged: Judged, new: int, missing: str) -> None:
        good = sum(each.good for each in judged.known.values())
        figures: JsonObject = {
            "judged": len(judged.known),
            "good": good,
            "new": new,
            "open": {**judged.open},
            "missing": missing,
        }
        if figures != state.judged:
            aside = "".join(f"; {count} wait: {why}" for why, count in judged.open.items())
            said = f"{len(judged.known)} episodes are judged, {good} of them successes{aside}"
            self._note(WatchStep.JUDGED, f"{said}; {missing}" if missing else said, figures=figures)

    def _could_not(self, state: State, error: RLError) -> None:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        counted: JsonObject = {}
        if isinstance(error, Unmeasured):
            counted = {"unmeasured": True}
        elif isinstance(error, TrainingError | CaughtFailure):
            counted = {"failed": True}
        last = self._journal.read()[-1:]
        known = [each for each in last if each.step is WatchStep.COULD_NOT and each.said == said]
        if known and not counted and time.time() - known[0].at < _REPEATED_AFTER:
            self._say(known[0])
            return
        number = state.round.number if state.round is not None else 0
        self._note(WatchStep.COULD_NOT, said, round=number, figures=counted)

    def _note(
        self, step: WatchStep, said: str, *, round: int = 0, adapter: str = "", figures: JsonObject | None = None
    ) -> None:
        self._say(self._journal.append(step, said, round=round, adapter=adapter, figures=figures))

    def _in_use(self) -> str:
        """The version in use; empty for the base model."""
        current = self._adapters.current(self._name)
        return current.name if current is not None else ""
