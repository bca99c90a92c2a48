"""``openhands-rl watch``: learn in use: judge new episodes, train candidates, deploy them through gates, roll back.

actions:
  run        (default) do all that can be done now: judge what came into [rl.storage], train a candidate, let it in
  status     what is in use, what it waits for, and the last lines of the journal
  rollback   use the version before, or --to another one, or --to base; its episodes are not learnt from any more

examples:
  */10 * * * *  openhands-rl watch --config config.toml   # in cron: a look every ten minutes
  openhands-rl watch rollback --config config.toml --to policy-v000003

[rl.watch] says when there is enough to learn from and what a candidate has to pass, [rl.reward] who judges (labels of
people come first), [rl.training] how is trained, [rl.serving] which servers get the versions. The journal lies in
ADAPTERS/NAME.watch; the exit status is 1 when a step could not be done.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.apps.serving import served_policy
from openhands_rl_plugin.cli.options import add_option, backend_of
from openhands_rl_plugin.cli.terminal import ENDING, sayable, silence_libraries
from openhands_rl_plugin.config.build import open_storage
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.core.errors import ConfigError, from_extra
from openhands_rl_plugin.models.generator.threads import prepare_threads

if TYPE_CHECKING:
    from openhands_rl_plugin.contrib.watch.journal import Entry, Journal
    from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher
    from openhands_rl_plugin.models.adapters.store import AdapterStore

RESUME = "the journal has every step, and the same command goes on"
_RUN = "run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The action, the settings, and how episodes of the held-out suite are rolled out."""
    parser.add_argument("action", nargs="?", choices=[_RUN, "status", "rollback"], default=_RUN, help="what to do")
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="a config.toml with an [rl] section")
    add_option(parser, "--model", "DIR", "folder of the base model's weights (default: as the model server says)")
    parser.add_argument("--dry-run", action="store_true", help="check settings, servers and suite, do nothing")
    parser.add_argument("--to", metavar="VERSION", help="rollback: a number, a name or base (default: the one before)")
    from openhands_rl_plugin.cli.loop import add_episodes

    add_episodes(parser.add_argument_group("held-out suite"))


def run(args: argparse.Namespace) -> int:
    """Watch, or answer about it. Raises ``RLError`` when the settings, the servers or the store are unusable."""
    from openhands_rl_plugin.contrib.watch.journal import Journal, status_lines
    from openhands_rl_plugin.evals.runs.run_files import held
    from openhands_rl_plugin.models.adapters.store import AdapterStore

    settings = load_settings(args.config)
    adapters = AdapterStore(settings.serving.adapters_directory.resolve())
    journal = Journal(adapters.root / f"{settings.serving.adapter}.watch")
    if args.action == "status":
        print(sayable("\n".join(status_lines(journal, adapters, settings.serving.adapter))))
        return 0
    if args.dry_run:
        return _watch(args, settings, adapters, journal.folder)
    taken = "another `openhands-rl watch` is at work here; end it first: it goes on from its journal"
    of_store = settings.storage.directory / "watch"
    with held(journal.folder, taken), held(of_store, taken) if settings.storage_backend == "file" else nullcontext():
        if args.action == "rollback":
            print(sayable(ENDING.run(_rollback(args, settings, adapters, journal))))
            return 0
        return _watch(args, settings, adapters, journal.folder)


async def _rollback(args: argparse.Namespace, settings: RLSettings, adapters: AdapterStore, journal: Journal) -> str:
    from openhands_rl_plugin.contrib.watch.journal import roll_back

    async with _publisher(settings, adapters) as publisher:
        return (await roll_back(journal, adapters, publisher, settings.serving.adapter, args.to)).said


def _publisher(settings: RLSettings, adapters: AdapterStore) -> AdapterPublisher:
    from openhands_rl_plugin.models.adapters.publisher import publisher_for

    if not settings.serving.publish_urls:
        raise ConfigError("[rl.serving] base_url: no model server is named, so nothing could be let in; set it")
    return publisher_for(settings.serving, adapters)


def _watch(args: argparse.Namespace, settings: RLSettings, adapters: AdapterStore, folder: Path) -> int:
    silence_libraries()
    prepare_threads()
    with from_extra("openhands,train"):
        from openhands_rl_plugin.apps.loop.run import loop_job
        from openhands_rl_plugin.cli.loop import EPISODES
        from openhands_rl_plugin.contrib.watch.gathering import check_calibrated
        from openhands_rl_plugin.contrib.watch.service import Watch, suite_tasks
    settings.training.check_servable()
    check_calibrated(settings)
    tasks = suite_tasks(settings)
    publisher = _publisher(settings, adapters)
    with served_policy(settings, args.model, folder) as (served, model):
        settings = served
    if args.dry_run:
        urls = ", ".join(settings.serving.publish_urls)
        print(sayable(f"{urls} gets {settings.serving.adapter}, journal in {folder}"))
        return 0
    given = {name: getattr(args, name) for name in EPISODES}
    backend = backend_of(args, [entry.instance for entry in tasks.entries])
    job = loop_job(settings, tasks, model, folder, backend=backend, command=args.typed, kind="watch", **given)

    async def look() -> bool:
        storage = open_storage(settings)
        try:
            async with publisher:
                watch = Watch(job, storage, adapters, publisher, _print)
                watch.check()
                return await watch.look()
        finally:
            await storage.close()

    return 0 if ENDING.run(look()) else 1


def _print(entry: Entry) -> None:
    print(sayable(f"{entry.step}: {entry.said}"), flush=True)
