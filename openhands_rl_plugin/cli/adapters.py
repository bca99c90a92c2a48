"""``openhands-rl adapters``: list the versions of an adapter, publish one, or roll back.

examples:
  openhands-rl adapters list --adapters ./adapters
  openhands-rl adapters list --config config.toml
  openhands-rl adapters publish --config config.toml
  openhands-rl adapters publish --adapters ./adapters --version 7 \\
      --set serving.base_urls='["http://10.0.0.5:8000/v1", "http://10.0.0.6:8000/v1"]' serving.server=vllm
  openhands-rl adapters rollback --config config.toml
  openhands-rl adapters export --adapters ./adapters --merged ./merged

A version comes into use when every server reproduces the trainer's logprobs of its probe (a fixed text); otherwise all
servers keep the old one. vLLM needs --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True. SGLang needs --enable-lora
--max-lora-rank RANK --lora-target-modules all; its name of an adapter is BASE:VERSION.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from openhands_rl_plugin.apps.serving import LATEST, find_version, publish
from openhands_rl_plugin.cli.options import add_option, add_settings, settings_of
from openhands_rl_plugin.cli.terminal import silence_libraries
from openhands_rl_plugin.core.errors import ConfigError, from_extra

if TYPE_CHECKING:
    from openhands_rl_plugin.models.adapters.store import AdapterStore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The action, the folder of the versions, and the servers."""
    parser.add_argument("action", choices=["list", "publish", "rollback", "export"], help="what to do")
    add_settings(parser)
    add_option(parser, "--adapters", "DIR", "folder of the versions (default: [rl.serving] adapters_path)")
    add_option(parser, "--version", "VERSION", "publish, export: a number or a name", default=LATEST)
    add_option(parser, "--merged", "DIR", "export: new folder for the base model with the version's weights")
    add_option(parser, "--model", "PATH", "export: the base model (default: the one that was trained)", default="")


async def run(args: argparse.Namespace) -> int:
    """List, publish, roll back or export. Raises ``RLError`` when options, versions or servers are wrong."""
    from openhands_rl_plugin.models.adapters.store import AdapterStore

    serving = settings_of(args).serving
    store, name = AdapterStore((args.adapters or serving.adapters_directory).resolve()), serving.adapter
    match args.action:
        case "list":
            _list(store, name)
        case "export":
            if args.merged is None:
                raise ConfigError("export: --merged DIR names the new folder")
            adapter = find_version(store, name, args.version, "--version")
            silence_libraries()
            with from_extra("train"):
                from openhands_rl_plugin.models.adapters.merged import write_merged
            write_merged(adapter, args.merged, args.model)
            print(f"{adapter.name} is in {args.merged}, a whole model")
        case "publish":
            await publish(serving, store, find_version(store, name, args.version, "--version"))
        case _:
            current = store.current(name)
            earlier = [each for each in store.versions(name) if current is not None and each.version < current.version]
            if not earlier:
                used = current.name if current is not None else f"no version of {name}"
                raise ConfigError(f"{used} is in use in {store.root}: there is no earlier one to roll back to")
            await publish(serving, store, earlier[-1])
    return 0


def _list(store: AdapterStore, name: str) -> None:
    from openhands_rl_plugin.trajectories.view import console, table

    current, rows = store.current(name), list[tuple[str, ...]]()
    for each in store.versions(name):
        probe, used = "yes" if store.probe(each) else "-", "yes" if each == current else ""
        rows.append((each.name, each.parent or "-", each.base_model, str(each.step), probe, used))
    columns = ("version", "parent", "base model", "step", "probe", "in use")
    console().print(table(columns, rows, numbers=("step",)))
