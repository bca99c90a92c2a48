"""``openhands-rl watch``: learn in use: judge new episodes, train candidates, deploy them through gates, roll back."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.cli.options.ending import ENDING
from openhands_rl_plugin.cli.options.foreground import sayable, silence_libraries
from openhands_rl_plugin.cli.options.jobs import add_native, graded_job, loop_job, with_backend
from openhands_rl_plugin.cli.options.suites import add_bounds, add_repositories
from openhands_rl_plugin.cli.options.weights import at_server
from openhands_rl_plugin.config.build import open_storage
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.contrib.watch.settings import watch_settings
from openhands_rl_plugin.core.errors import ConfigError, MissingExtraError, describe
from openhands_rl_plugin.models.generator.threads import prepare_threads

if TYPE_CHECKING:
    from openhands_rl_plugin.apps.loop.run import LoopJob
    from openhands_rl_plugin.contrib.watch.journal import Entry
    from openhands_rl_plugin.contrib.watch.service import Watch
    from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher
    from openhands_rl_plugin.models.adapters.store import AdapterStore

RESUME = "the journal has every step, and the same command goes on"
EPILOG = """actions:
  run        (default) judge what comes into [rl.storage], train candidates, let them in through the gates
  status     what is in use, what it waits for, and the last lines of the journal
  rollback   use the version before, or --to another one, or --to base; its episodes are not learnt from any more
  pause      begin nothing new; a training stops and goes on from its last checkpoint
  resume     go on

examples:
  openhands-rl watch --config config.toml
  openhands-rl watch --config config.toml --once          # from cron: all that can be done now, then exit
  openhands-rl watch --config config.toml --dry-run
  openhands-rl watch status --config config.toml --json
  openhands-rl watch rollback --config config.toml
  openhands-rl watch rollback --config config.toml --to policy-v000003

[rl.watch] says when there is enough to learn from and what a candidate has to pass, [rl.reward] who judges (labels of
people come first), [rl.training] how is trained, [rl.serving] which servers get the versions. The journal lies in
ADAPTERS/NAME.watch; `--once` exits with 1 when a step could not be done.
"""
_RUN = "run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The action, the settings, and how episodes of the held-out suite are played."""
    actions = [_RUN, "status", "rollback", "pause", "resume"]
    parser.add_argument("action", nargs="?", choices=actions, default=_RUN, help="what to do")
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="a config.toml with an [rl] section")
    weights = "folder of the base model's weights (default: as the model server says)"
    parser.add_argument("--model", type=Path, metavar="DIR", help=weights)
    parser.add_argument("--once", action="store_true", help="do all that can be done now, then exit")
    parser.add_argument("--dry-run", action="store_true", help="check everything and print the plan, do nothing")
    parser.add_argument("--to", metavar="VERSION", help="rollback: a number, a name or base (default: the one before)")
    force = "rollback: also to a candidate that was held back"
    parser.add_argument("--force", action="store_true", help=force)
    parser.add_argument("--json", action="store_true", help="status: print JSON")
    played = parser.add_argument_group("held-out suite")
    add_bounds(played)
    add_repositories(played)
    add_native(played)


def run(args: argparse.Namespace) -> int:
    """Watch, or answer about it. Raises ``RLError`` when the settings, the servers or the store are unusable."""
    from openhands_rl_plugin.contrib.watch.journal import folder_of
    from openhands_rl_plugin.models.adapters.store import AdapterStore

    settings = load_settings(args.config)
    adapters = AdapterStore(settings.serving.adapters_directory.resolve())
    folder = folder_of(adapters.root, settings.serving.adapter)
    if args.action == _RUN:
        return _watch(args, settings, adapters, folder)
    if args.action == "status":
        _status(args, settings, adapters, folder)
    elif args.action == "rollback":
        print(sayable(ENDING.run(_rollback(args, settings, adapters, folder))))
    else:
        print(_pause(args, folder))
    return 0


def _status(args: argparse.Namespace, settings: RLSettings, adapters: AdapterStore, folder: Path) -> None:
    from openhands_rl_plugin.contrib.watch.journal import status_of

    found = status_of(folder, adapters, settings.serving.adapter)
    print(found.model_dump_json(indent=1) if args.json else sayable("\n".join(found.lines())))


def _pause(args: argparse.Namespace, folder: Path) -> str:
    from openhands_rl_plugin.contrib.watch.journal import pause, resume

    if args.action == "pause":
        pause(folder)
        return "paused: what is in progress ends, nothing else begins until `openhands-rl watch resume`"
    return "the watch goes on" if resume(folder) else "it was not paused"


async def _rollback(args: argparse.Namespace, settings: RLSettings, adapters: AdapterStore, folder: Path) -> str:
    from openhands_rl_plugin.contrib.watch.journal import Journal, roll_back

    async with _publisher(settings, adapters) as publisher:
        return (
            await roll_back(Journal(folder), adapters, publisher, settings.serving.adapter, args.to, force=args.force)
        ).said


def _publisher(settings: RLSettings, adapters: AdapterStore) -> AdapterPublisher:
    from openhands_rl_plugin.models.adapters.publisher import publisher_for

    if not settings.serving.publish_urls:
        raise ConfigError("[rl.serving] base_url: no model server is named, so nothing could be let in; set it")
    return publisher_for(settings.serving, adapters)


def _watch(args: argparse.Namespace, settings: RLSettings, adapters: AdapterStore, folder: Path) -> int:
    silence_libraries()
    prepare_threads()
    try:
        from openhands_rl_plugin.apps.loop.checks import check_alone
        from openhands_rl_plugin.contrib.watch.gates import suite_tasks
        from openhands_rl_plugin.contrib.watch.gathering import check_calibrated
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "openhands", "openhands") from error
    check_alone()
    settings.training.check_servable()
    check_calibrated(settings)
    tasks = suite_tasks(settings)
    publisher = _publisher(settings, adapters)
    settings, model = at_server(settings, args.model)
    if args.dry_run:
        print(sayable("\n".join(_plan(settings, folder, len(tasks.held_out)))))
        return 0
    with _alone(settings, folder):
        job = graded_job(args, loop_job(args, settings, model, tasks, folder, "watch"))
        return ENDING.run(_serve(args, job, adapters, publisher))


async def _serve(args: argparse.Namespace, job: LoopJob, adapters: AdapterStore, publisher: AdapterPublisher) -> int:
    from openhands_rl_plugin.contrib.watch.service import Watch

    storage = open_storage(job.settings)
    try:
        async with publisher, with_backend(args, job) as whole:
            return await _looked(args, Watch(whole, storage, adapters, publisher, _print))
    finally:
        await storage.close()


async def _looked(args: argparse.Namespace, watch: Watch) -> int:
    watch.check()
    if args.once:
        return 0 if await watch.look() else 1
    await watch.run()
    return 0


def _print(entry: Entry) -> None:
    print(sayable(f"{entry.step}: {entry.said}"), flush=True)


def _plan(settings: RLSettings, folder: Path, tasks: int) -> list[str]:
    """The output of a dry run."""
    watch, serving = watch_settings(settings), settings.serving
    return [
        f"{serving.adapter}: versions of {serving.model} at {', '.join(serving.publish_urls)}",
        f"  judged by: labels of people, else [rl.reward] {settings.reward.name}",
        f"  a candidate: after {watch.min_episodes} new judged episodes, where at least {watch.min_used} can be used",
        f"  measured on: {tasks} tasks of {watch.suite}, {watch.attempts} attempts each; a loss of {watch.margin:g} in "
        "success is allowed",
        f"  journal: {folder}",
    ]


@contextmanager
def _alone(settings: RLSettings, folder: Path) -> Iterator[None]:
    """One watch an adapter, and one a store that is a folder. Raises ``ConfigError``."""
    from openhands_rl_plugin.evals.runs.run_files import lock_folder

    taken = "another `openhands-rl watch` is at work here; `openhands-rl watch status` says what it does"
    folders = [folder]
    if settings.storage_backend == "file":
        folders.append(settings.storage.directory / "watch")
    held: list[int] = []
    try:
        for each in folders:
            try:
                each.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"{each} cannot be made: {describe(error)}") from error
            held.append(lock_folder(each, taken))
        yield
    finally:
        for lock in held:
            os.close(lock)
