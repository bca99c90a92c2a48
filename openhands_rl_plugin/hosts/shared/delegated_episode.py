"""The episode of a sub-agent: one of its own, which names the episode that it was begun in."""

from __future__ import annotations

import threading
import zlib

from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.protocols import Strategy
from openhands_rl_plugin.core.records import SUB_AGENT, sub_agents_run, trajectory_id
from openhands_rl_plugin.core.types import EpisodeRequest, Failure, JsonObject, StopReason, Task
from openhands_rl_plugin.hosts.shared.episode import HostEpisode
from openhands_rl_plugin.hosts.shared.standalone_run import workspace_task_id


def delegated_episode(
    parent: HostEpisode,
    *,
    session: str,
    kind: str,
    instruction: str,
    strategy: Strategy,
    model: str | None = None,
) -> HostEpisode:
    """The episode of a sub-agent of ``kind`` in ``session``. ``model``: the served name where it is not the parent's.

    Its run and its group are not the parent's: it is no sample of that task. Its split is, so that what a run measures
    with is not learnt from.
    """
    asked = parent.request
    link: JsonObject = {"parent": trajectory_id(asked), "kind": kind}
    task = Task(
        id=workspace_task_id(instruction, session),
        environment=asked.task.environment,
        instruction=instruction,
        data={SUB_AGENT: link},
        split=asked.task.split,
        limits=asked.task.limits,
    )
    request = EpisodeRequest(
        task=task,
        run_id=sub_agents_run(asked.run_id),
        group_id=session,
        seed=zlib.crc32("\0".join((str(asked.seed), kind, instruction)).encode()),
        served_model=asked.served_model if model is None else None,
        sampling=asked.sampling,
    )
    return HostEpisode(
        request,
        parent.settings,
        strategy=strategy,
        strategy_spec=parent.strategy_spec,
        base_model=model or parent.base_model,
        environment_mode=parent.environment_mode,
        workspace=parent.workspace,
        token_ids=parent.token_ids,
    )


class DelegatedRun:
    """Stores a sub-agent's episode where the runner of ``parent`` stores that one."""

    def __init__(self, episode: HostEpisode, parent: HostEpisode) -> None:
        self._episode = episode
        self._kept = False
        self._lock = threading.Lock()
        episode.keep_beside(parent)

    def keep(self, stop: StopReason | None = None, failure: Failure | None = None) -> None:
        """Close the episode; later calls do nothing. Raises ``StorageError``."""
        with self._lock:
            kept, self._kept = self._kept, True
        if not kept:
            background().wait_for(self._episode.end(self._episode.freeze(stop=stop, failure=failure)))
