"""The service: from where the journal stands, one step after the other, each of which may be repeated."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from openhands_rl_plugin.apps.loop.run import LoopJob
from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.contrib.watch import gates, gathering
from openhands_rl_plugin.contrib.watch.gates import Verdict
from openhands_rl_plugin.contrib.watch.journal import CANARY, HELD_OUT, Entry, Journal, Round, State, WatchStep
from openhands_rl_plugin.contrib.watch.settings import watch_settings
from openhands_rl_plugin.core.errors import (
    CaughtFailure,
    ConfigError,
    InfrastructureError,
    PublishError,
    RLError,
    StorageError,
    TrainingError,
    boundary,
)
from openhands_rl_plugin.core.machine import forget_unused
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.types import Adapter, FailureKind, JsonObject
from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.training.data.dataset import TrainingDataset
from openhands_rl_plugin.training.learn import create_version, fit
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer

log = redacting_logger(__name__)

ROUND = "watch_round"
"""The metric of a version that says which round made it."""
TRAINING = "training"
_MOST_TRIES = 3
"""Of one training; what fails in the same way three times is no passing trouble."""
_LONGEST_WAIT = 3600.0


@dataclass
class Watch:
    """One adapter's watch. ``job``: the held-out tasks, the model's weights, the servers, and the folder of the state.

    ``say`` is called with every line of the journal.
    """

    job: LoopJob
    storage: TrajectoryStorage
    adapters: AdapterStore
    publisher: AdapterPublisher
    say: Callable[[Entry], None] = lambda entry: None

    def __post_init__(self) -> None:
        self._settings = self.job.settings
        self._watch = watch_settings(self._settings)
        self._name = self._settings.serving.adapter
        self._journal = Journal(self.job.directory)
        self._measured = {(entry.task.environment, entry.task.id) for entry in self.job.tasks.held_out}
        self._judge = gathering.EpisodeJudge(self._settings, self.storage)
        self._fruitless: int | None = None
        """What was judged when there was nothing to train on; the same again is not read again."""

    def check(self) -> None:
        """Freeze the held-out suite, or raise ``ConfigError`` where it is another than before."""
        digest, state = gates.digest_of(self.job.tasks), self._journal.state()
        if not state.suite:
            count = len(self.job.tasks.held_out)
            sentence = f"the held-out suite is {count} tasks of {self.job.tasks.suite.name} from now on"
            self._note(WatchStep.FROZEN, sentence, figures={"digest": digest, "tasks": count})
        elif state.suite != digest:
            raise ConfigError(
                "[rl.watch] suite: its tasks are others than those that former versions were measured on, so nothing "
                f"could be compared: set it back, or move {self._journal.folder} away to begin anew"
            )

    async def run(self) -> None:
        """Look at the store every ``interval`` seconds; trouble is noted and waited out."""
        while True:
            try:
                await self.look()
            except StorageError as error:
                log.warning("%s", error)  # the journal itself takes no line: the disk is full, or away
            tries = self._journal.state().tries
            await asyncio.sleep(min(_LONGEST_WAIT, self._watch.interval * 2 ** min(tries, 10)))

    async def look(self) -> bool:
        """Do all that can be done now; whether nothing went wrong. Raises ``StorageError`` of the journal itself."""
        while True:
            state = self._journal.state()
            try:
                if not await self._advance(state):
                    return True
            except RLError as error:
                self._could_not(state, error)
                return False

    async def _advance(self, state: State) -> bool:
        """One step; false where there is nothing to do now."""
        if (current := state.round) is None:
            return await self._begin(state)
        if not current.candidate:
            await self._train(state, current)
            return True
        candidate, used = self.adapters.get(current.candidate), self._in_use()
        unmeasured = [name for name in (used, candidate.name) if name not in state.measured]
        if CANARY not in current.passed:
            await self._canary(current, candidate)
        elif unmeasured:
            await self._measure(state, current, unmeasured[0])
        elif HELD_OUT not in current.passed:
            await self._decide(current, candidate, self._held_out(state, candidate))
        else:
            await self._admit(current, candidate)
        return True

    async def _begin(self, state: State) -> bool:
        self._tidy(state)
        lineage = gathering.chain(self.adapters, self._in_use() or None)
        ids = await gathering.candidates(self.storage, self._settings, state, lineage, self._measured)
        judged = await self._judge.judge(ids)
        about = {*judged.known, *(name for both in judged.preferred for name in both)}
        new, needed = len(about - state.seen), self._watch.min_episodes
        found, missing = None, f"{new} new ones of {needed} that are needed"
        there = hash((frozenset(judged.known.items()), frozenset(judged.preferred.items())))
        if new >= needed and there == self._fruitless:
            missing = str(state.judged.get("missing"))
        elif new >= needed:
            found, missing = await gathering.material(self.storage, self._settings, judged, lineage)
        self._note_judged(state, judged, new, missing)
        if found is not None:
            self._gather(state, found, about)
            return True
        self._fruitless = there
        if judged.away:
            raise InfrastructureError(f"episodes wait, because their judge is away: {judged.away}")
        return False

    def _tidy(self, state: State) -> None:
        """Remove the last round's checkpoints, and all versions that the watch made but the newest, the one in use and
        the last ones that were admitted, to which a rollback may go. What cannot be removed is logged, and stays."""
        shutil.rmtree(self._checkpoints(state.rounds), ignore_errors=True)
        kept = {self._in_use(), *state.admitted[-self._watch.keep_versions :]}
        try:
            made = [each.name for each in self.adapters.versions(self._name) if ROUND in each.metrics]
            for name in made[: -self._watch.keep_versions]:
                if name not in kept:
                    self.adapters.remove(name)
                    log.info("removed %s", name)
        except StorageError as error:
            log.warning("%s", error)

    def _note_judged(self, state: State, judged: gathering.Judged, new: int, missing: str) -> None:
        count, good = len(judged.known), sum(each.good for each in judged.known.values())
        figures: JsonObject = {"judged": count, "good": good, "new": new, "open": {**judged.open}, "missing": missing}
        if figures != state.judged:
            aside = "".join(f"; {count} wait: {why}" for why, count in judged.open.items())
            sentence = f"{count} episodes are judged, {good} of them successes{aside}"
            self._note(WatchStep.JUDGED, f"{sentence}; {missing}" if missing else sentence, figures=figures)

    def _gather(self, state: State, found: gathering.Material, about: Collection[str]) -> None:
        latest, parent = self.adapters.latest(self._name), self._in_use()
        figures: JsonObject = {
            "algorithm": found.settings.algorithm,
            "parent": parent or None,
            "latest": latest.version if latest is not None else 0,
            "episodes": {**found.episodes},
            "others": [*sorted({*about} - found.episodes.keys())],
        }
        number = state.rounds + 1
        begins = f"round {number} begins from {parent or 'the base model'}: {found.because}"
        self._note(WatchStep.GATHERED, begins, round=number, figures=figures)

    async def _train(self, state: State, current: Round) -> None:
        settings = gathering.training_for(self._settings.training, current.algorithm)
        dataset = await gathering.dataset_of(self.storage, self._settings, settings, current.episodes)
        started = time.monotonic()
        try:
            adapter = await asyncio.to_thread(self._candidate, settings, dataset, current)
        except (TrainingError, CaughtFailure) as error:
            if state.tries + 1 < _MOST_TRIES:
                raise
            sentence = f"round {current.number} ends: its training failed {_MOST_TRIES} times: {error}"
            self._note(WatchStep.HELD, sentence, round=current.number, figures={"gate": TRAINING})
            return
        sentence = f"{adapter.name} was trained on {dataset.used} episodes by {dataset.algorithm}"
        figures: JsonObject = {**adapter.metrics, "seconds": time.monotonic() - started}
        self._note(WatchStep.TRAINED, sentence, round=current.number, adapter=adapter.name, figures=figures)

    def _candidate(self, settings: TrainingSettings, dataset: TrainingDataset, current: Round) -> Adapter:
        """Train the round's version, from the last checkpoint, or find the one that a killed process has written.

        Raises ``TrainingError``, ``StorageError`` and ``CaughtFailure`` for what a library raises, such as too little
        memory.
        """
        for each in self.adapters.versions(self._name):
            of_round = each.version > current.latest and each.metrics.get(ROUND) == current.number
            if of_round and self.adapters.probe(each) is not None:
                return each
        if not dataset.samples:
            raise TrainingError(f"nothing to train on; left out: {dataset.excluded.in_words()}")
        parent = self.adapters.get(current.parent) if current.parent is not None else None
        with boundary(FailureKind.MODEL, "training"):
            trainer = LocalTrainer(self.job.model, settings, adapter=parent)
            metrics = fit(trainer, dataset, run=self._checkpoints(current.number))
            adapter, _ = create_version(
                trainer,
                self.adapters,
                self._name,
                base_model=self._settings.serving.model,
                parent=parent,
                steps=int(metrics["steps"]),
                metrics=metrics | {"episodes_used": float(dataset.used), ROUND: float(current.number)},
                probe_ids=dataset.samples[0].input_ids,
            )
            trainer.finish()
        assert adapter is not None, "a watch is one process"
        del trainer
        forget_unused()
        return adapter

    async def _canary(self, current: Round, candidate: Adapter) -> None:
        await self.publisher.loaded()  # servers that are away are no reason to refuse a candidate
        try:
            difference = await self.publisher.stage(candidate)
        except PublishError as error:
            await self.publisher.loaded()  # raises where they went away meanwhile
            verdict = Verdict(False, f"{candidate.name} was held back by the canary: {error}", {"gate": CANARY})
        else:
            nats = "" if difference is None else f", {difference:.4f} nats from the trainer's logprobs"
            sentence = f"{candidate.name} passed the canary: every server loaded it and answers with it{nats}"
            verdict = Verdict(True, sentence, {"gate": CANARY, "difference": difference})
        await self._decide(current, candidate, verdict)

    async def _measure(self, state: State, current: Round, version: str) -> None:
        served = self._settings.serving.model
        if version:
            adapter = self.adapters.get(version)
            await self.publisher.stage(adapter)  # a server may have been started anew since
            served = await self.publisher.served_model(adapter)
        run_id = f"{self.job.run_id}/heldout/{version or 'base'}/{state.tries}"
        found = await gates.measure(self.job, self.storage, version=version, run_id=run_id, served_model=served)
        sentence = f"{version or 'the base model'} succeeds in {found.mean:.3f} of {len(found.success)} tasks"
        figures = found.model_dump(mode="json", exclude={"version"})
        self._note(WatchStep.MEASURED, sentence, round=current.number, adapter=version, figures=figures)

    def _held_out(self, state: State, candidate: Adapter) -> Verdict:
        used = state.measured[self._in_use()]
        standing = [name for name in ("", *state.admitted) if name in state.measured and name not in state.dropped]
        best = max((state.measured[name] for name in standing), key=lambda each: each.mean, default=used)
        against = {each.version or "the base model": each.success for each in (used, best)}
        return gates.held_out_gate(candidate.name, state.measured[candidate.name].success, against, self._watch.margin)

    async def _decide(self, current: Round, candidate: Adapter, verdict: Verdict) -> None:
        if not verdict.passed:
            try:
                await self.publisher.retire(candidate.name)
            except PublishError as error:
                log.warning("%s stays loaded: %s", candidate.name, error)
        step = WatchStep.PASSED if verdict.passed else WatchStep.HELD
        self._note(step, verdict.sentence, round=current.number, adapter=candidate.name, figures=verdict.figures)

    async def _admit(self, current: Round, candidate: Adapter) -> None:
        with self._journal.alone():
            now = self._journal.state().round
            if now is None or now.number != current.number:
                return  # somebody rolled back meanwhile
            if self._in_use() != candidate.name:
                await self.publisher.publish(candidate)
            sentence = f"{candidate.name} is in use"
            self._note(WatchStep.ADMITTED, sentence, round=current.number, adapter=candidate.name)

    def _could_not(self, state: State, error: RLError) -> None:
        number = state.round.number if state.round is not None else 0
        sentence = (str(error) or type(error).__name__).splitlines()[0]
        self._note(WatchStep.COULD_NOT, sentence, round=number)

    def _note(
        self, step: WatchStep, sentence: str, *, round: int = 0, adapter: str = "", figures: JsonObject | None = None
    ) -> None:
        self.say(self._journal.append(step, sentence, round=round, adapter=adapter, figures=figures))

    def _checkpoints(self, number: int) -> Path:
        return self._journal.folder / "training" / f"round-{number:04d}"

    def _in_use(self) -> str:
        """The version in use; empty for the base model."""
        current = self.adapters.current(self._name)
        return current.name if current is not None else ""
