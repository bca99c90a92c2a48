"""``openhands-rl adapters list|publish|rollback|export``: the versions of an adapter.

examples:
  openhands-rl adapters list --adapters ./adapters
  openhands-rl adapters list --config config.toml --base-url http://127.0.0.1:8100/v1
  openhands-rl adapters publish --config config.toml
  openhands-rl adapters publish --adapters ./adapters --version 7 \\
      --base-url http://10.0.0.5:8000/v1 --base-url http://10.0.0.6:8000/v1 --server vllm
  openhands-rl adapters rollback --config config.toml
  openhands-rl adapters rollback --config config.toml --to 3
  openhands-rl adapters export --adapters ./adapters --merged ./merged

A version comes into use when every server reproduces the trainer's logprobs of its probe (a fixed text); otherwise all
servers keep the old one. vLLM needs --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True. SGLang needs --enable-lora
--max-lora-rank RANK --lora-target-modules all; its name of an adapter is BASE:VERSION.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from openhands_rl_plugin.cli.jobs import LATEST, find_version
from openhands_rl_plugin.cli.options import checked, option_of
from openhands_rl_plugin.cli.terminal import silence_libraries
from openhands_rl_plugin.config.rl import ServingSettings
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.core.errors import ConfigError, from_extra
from openhands_rl_plugin.models.adapters.publisher import publisher_for

if TYPE_CHECKING:
    from openhands_rl_plugin.core.types import Adapter
    from openhands_rl_plugin.models.adapters.store import AdapterStore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The action, the folder of the versions, and the servers."""
    parser.add_argument("action", choices=["list", "publish", "rollback", "export"], help="what to do")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a config.toml; options given here override it")
    parser.add_argument(
        "--adapters", metavar="DIR", help="folder of the versions (default: [rl.serving] adapters_path)"
    )
    parser.add_argument("--adapter", metavar="NAME", help="name of the adapter (default: [rl.serving] adapter, policy)")
    parser.add_argument("--base-url", action="append", metavar="URL", help="a server; repeat it for each replica")
    kinds = get_args(ServingSettings.model_fields["server"].annotation)
    parser.add_argument("--server", choices=kinds, help="kind of the servers (default: detected)")
    parser.add_argument("--version", metavar="VERSION", help="publish, export: a number or a name (default: latest)")
    parser.add_argument(
        "--to", metavar="VERSION", help="rollback: a number or a name (default: the one before the current)"
    )
    parser.add_argument(
        "--merged", type=Path, metavar="DIR", help="export: new folder for the base model with the version's weights"
    )
    parser.add_argument(
        "--model", default="", metavar="DIR", help="export: the base model (default: the one that was trained)"
    )


async def run(args: argparse.Namespace) -> int:
    """List, publish, roll back or export. Raises ``RLError`` when options, versions or servers are wrong."""
    from openhands_rl_plugin.models.adapters.store import AdapterStore

    serving = _settings(args)
    store = AdapterStore(serving.adapters_directory.resolve())
    if args.action == "list":
        await _list(store, serving)
        return 0
    if args.action == "export":
        _export(store, serving.adapter, args)
        return 0
    if args.action == "publish":
        adapter = find_version(store, serving.adapter, args.version or LATEST, "--version")
    elif args.to:
        adapter = find_version(store, serving.adapter, args.to, "--to")
    else:
        adapter = _previous(store, serving.adapter)
    async with publisher_for(serving, store) as publisher:
        report = await publisher.publish(adapter)
        served = await publisher.served_model(adapter)
    proof = "no probe" if report.difference is None else f"probe within {report.difference:.4f} nats"
    print(f"{adapter.name} is in use after {report.seconds:.1f} s ({proof}); its model name is {served}")
    if report.unloaded:
        print(f"  unloaded: {', '.join(report.unloaded)}")
    return 0


async def _list(store: AdapterStore, serving: ServingSettings) -> None:
    from openhands_rl_plugin.trajectories.view import console, table

    current = store.current(serving.adapter)
    versions = store.versions(serving.adapter)
    if not versions:
        print(f"{serving.adapter} has no versions in {store.root}")
        return
    columns = ["version", "parent", "base model", "step", "probe", "in use"]
    rows = [
        [
            each.name,
            each.parent or "-",
            each.base_model,
            str(each.step),
            "yes" if store.probe(each) else "-",
            "yes" if each == current else "",
        ]
        for each in versions
    ]
    if serving.publish_urls:
        async with publisher_for(serving, store) as publisher:
            servers = await publisher.loaded()
        columns.append("loaded on")
        for row, each in zip(rows, versions, strict=True):
            row.append(", ".join(url for url, names in servers if each.name in names))
    console().print(table(columns, rows, numbers=("step",)))


def _export(store: AdapterStore, name: str, args: argparse.Namespace) -> None:
    if args.merged is None:
        raise ConfigError("export: --merged DIR names the new folder")
    adapter = find_version(store, name, args.version or LATEST, "--version")
    silence_libraries()
    with from_extra("train"):
        from openhands_rl_plugin.models.adapters.merged import write_merged
    write_merged(adapter, args.merged, args.model)
    print(f"{adapter.name} is in {args.merged}, a whole model")


def _settings(args: argparse.Namespace) -> ServingSettings:
    serving = load_settings(args.config).serving if args.config else ServingSettings()
    names = {"adapters_path": "adapters", "adapter": "adapter", "base_urls": "base_url", "server": "server"}
    given = {name: value for name, option in names.items() if (value := getattr(args, option)) is not None}
    return checked(ServingSettings, serving.model_dump() | given, {name: option_of(names[name]) for name in names})


def _previous(store: AdapterStore, name: str) -> Adapter:
    current = store.current(name)
    if current is None:
        raise ConfigError(f"no version of {name} is in use in {store.root}: give one with --to")
    earlier = [each for each in store.versions(name) if each.version < current.version]
    if not earlier:
        raise ConfigError(f"{current.name} is the first version of {name}: there is no earlier one to roll back to")
    return earlier[-1]
