"""``/api/adapters``: the versions of adapters, what each was made from, and how it does on held-out tasks."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from pathlib import Path

from pydantic import JsonValue, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from openhands_rl_plugin.config.success import success_rule
from openhands_rl_plugin.contrib.studio.replies import number, plain, reply
from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.core.browsing.listing import Browsable, value_of
from openhands_rl_plugin.core.browsing.terms import Column, Match, Term
from openhands_rl_plugin.core.errors import ConfigError, StorageError, describe
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import HELD_OUT_SPLITS, TrajectoryFilter
from openhands_rl_plugin.core.statistics import over_tasks
from openhands_rl_plugin.core.types import Adapter, JsonObject
from openhands_rl_plugin.models.adapters.store import LOADED, MANIFEST, PROBE, PROBED, AdapterStore, LoadedBy, ProbedOn

_VERSION = re.compile(r"(?P<name>.+)-v(?P<version>\d{6,})")
_MOST_VERSIONS = 2000
_MOST_EPISODES = 50_000
_HELD_OUT = Term(column=Column.SPLIT, any_of=tuple(Match(text=split) for split in sorted(HELD_OUT_SPLITS)))

_Measured = dict[str, JsonObject]
"""Served name -> what the stores know of it."""


class AdapterResource:
    """The folders of adapters, and what the stores know of their versions."""

    def __init__(self, sources: StudioSources) -> None:
        self._sources = sources
        self._known: dict[str, tuple[str, _Measured, dict[str, Counter[str]]]] = {}

    async def get(self, request: Request) -> Response:
        """``folders: [{name, adapters}]``."""
        held_out: _Measured = {}
        tokens: dict[str, Counter[str]] = defaultdict(Counter)
        for name, storage in self._sources.stores.items():
            found, spent = await self._measured(name, storage)
            held_out |= found
            for served, counts in spent.items():
                tokens[served].update(counts)
        folders: list[JsonValue] = []
        for name, root in sorted(self._sources.adapters.items()):
            versions = await asyncio.to_thread(versions_in, root)
            for version in versions:
                version["held_out"] = held_out.get(str(version["name"]))
                version["spent"] = {**tokens[served]} if (served := str(version["name"])) in tokens else None
            folders.append({"name": name, "adapters": [*versions]})
        return reply(request, {"folders": folders})

    async def _measured(self, name: str, storage: TrajectoryStorage) -> tuple[_Measured, dict[str, Counter[str]]]:
        """Served name -> its success on held-out tasks, and what its episodes took; counted anew when the store has
        changed."""
        revision = await storage.revision() if isinstance(storage, Browsable) else ""
        known = self._known.get(name)
        if known is None or not revision or known[0] != revision:
            known = self._known[name] = revision, await _held_out(storage), await _spent(storage)
        return known[1:]


async def _spent(storage: TrajectoryStorage) -> dict[str, Counter[str]]:
    """Of all episodes, also those that failed or did not end."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for each in await storage.tokens(TrajectoryFilter(finished=None)) if isinstance(storage, Browsable) else ():
        counts = {"episodes": each.episodes, "prompt": each.prompt_tokens, "completion": each.completion_tokens}
        found[each.policy.served_name].update(counts)
    return found


async def _held_out(storage: TrajectoryStorage) -> _Measured:
    tasks: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    where = TrajectoryFilter(failed=False, terms=(_HELD_OUT,), limit=_MOST_EPISODES)
    async for each in storage.summaries(where):
        reward = value_of(each, Column.REWARD)
        if isinstance(reward, float):
            success = float(success_rule(each.environment).holds(reward, each.stop))
            tasks[each.policy.served_name][f"{each.environment}\0{each.task_id}"].append(success)
    found: _Measured = {}
    for served, attempts in tasks.items():
        estimate = over_tasks([sum(each) / len(each) for each in attempts.values()])
        found[served] = {name: number(value) for name, value in estimate.model_dump().items()}
    return found


def versions_in(root: Path) -> list[JsonObject]:
    """The versions of the adapters in a folder, as their manifests say; ``problem`` of those without one."""
    store, found = AdapterStore(root), list[JsonObject]()
    names = sorted(entry.name for entry in root.iterdir() if _VERSION.fullmatch(entry.name)) if root.is_dir() else []
    for name in names[:_MOST_VERSIONS]:
        folder, match = root / name, _VERSION.fullmatch(name)
        assert match is not None, "it was looked for"
        body: JsonObject = {"name": name, "adapter": match["name"], "version": int(match["version"])}
        try:
            adapter = Adapter.model_validate_json((folder / MANIFEST).read_bytes())
            current = store.current(match["name"])
        except (OSError, ValidationError, StorageError, ConfigError) as error:
            found.append(body | {"problem": f"{MANIFEST} cannot be read: {describe(error)}"})
            continue
        found.append(
            body
            | {
                "parent": adapter.parent,
                "base_model": adapter.base_model,
                "step": adapter.step,
                "sha256": adapter.sha256,
                "metrics": plain({key: value for key, value in adapter.metrics.items()}),
                "made": (folder / MANIFEST).stat().st_mtime,
                "current": current is not None and current.name == name,
                "probe": (folder / PROBE).exists(),
                "loaded": [*_loaded(folder / LOADED)],
                "probed": _probed(folder / PROBED),
            }
        )
    return found


def _loaded(file: Path) -> tuple[str, ...]:
    try:
        return LoadedBy.model_validate_json(file.read_bytes()).urls
    except (OSError, ValidationError):
        return ()


def _probed(file: Path) -> JsonObject:
    """URL -> the difference that was measured there, in nats."""
    try:
        found = ProbedOn.model_validate_json(file.read_bytes()).differences
    except (OSError, ValidationError):
        return {}
    return {url: number(each) for url, each in found.items()}
