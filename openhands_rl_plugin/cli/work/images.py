"""``openhands-rl images``: the cache of container images that ``--backend image`` and its sandboxes use."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.cli.options.suites import add_images, image_limits
from openhands_rl_plugin.core.errors import ConfigError

if TYPE_CHECKING:
    from openhands_rl_plugin.evals.images.finding import ImageFinder
    from openhands_rl_plugin.evals.images.store import ImageStore, StoredImage

EPILOG = """examples:
  openhands-rl images pull swebench/sweb.eval.x86_64.psf_1776_requests-2931:latest
  openhands-rl images pull ./saved.tar --name swebench/sweb.eval.x86_64.psf_1776_requests-2931
  openhands-rl images pull ./sweb.eval.x86_64.psf_1776_requests-2931_latest.sif
  openhands-rl images pull debian:12 --images https://mirror.example.org
  openhands-rl images list
  openhands-rl images run --network debian:12 cat /etc/os-release
  openhands-rl images remove debian:12
  openhands-rl images remove --all

A file is an OCI layout or archive, what `docker save` or `podman save` wrote, or a .sif of Apptainer. Registries get
the login of `docker login`. Nothing needs privileges; `run` needs bubblewrap, and throws away what the command writes.
"""
RESUME = "the same command continues where it stopped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``pull``, ``list``, ``run`` and ``remove``."""
    what = parser.add_subparsers(dest="what", required=True, metavar="{pull,list,run,remove}")
    pull = what.add_parser("pull", help="download or read images, and unpack them")
    pull.add_argument("images_wanted", nargs="+", metavar="IMAGE", help="names, or files that hold an image")
    pull.add_argument("--name", default="", metavar="NAME", help="the name of a file's image, which finds it then")
    run = what.add_parser("run", help="run a command with a fresh writable layer above the image")
    run.add_argument("image", metavar="IMAGE", help="a name, or the beginning of an id")
    own = "the command, after all options; left out, the image's own"
    run.add_argument("program", nargs=argparse.REMAINDER, metavar="COMMAND", help=own)
    run.add_argument("--user", metavar="USER", help="instead of the image's")
    run.add_argument("--workdir", default="", metavar="DIR", help="instead of the image's")
    run.add_argument("--network", action="store_true", help="let the command use the network")
    for each in (pull, run):
        add_images(each)
        each.add_argument("--platform", default="", metavar="OS/ARCH", help="default: this machine's, as linux/amd64")
    listed = what.add_parser("list", help="the images that are unpacked, with their sizes")
    listed.add_argument("--json", action="store_true", help="print JSON")
    remove = what.add_parser("remove", help="remove images, and what killed processes left")
    remove.add_argument("names", nargs="*", metavar="IMAGE", help="names, or beginnings of ids")
    remove.add_argument("--all", action="store_true", help="remove all of them")
    for each in (pull, run, listed, remove):
        each.add_argument("--cache", type=Path, metavar="DIR", help="the folder (default: in the user's cache folder)")


async def run(args: argparse.Namespace) -> int:
    """Do what was asked; ``run`` gives the exit code of its command. Raises ``RLError``."""
    from openhands_rl_plugin.evals.images.store import ImageStore
    from openhands_rl_plugin.evals.swe.backends.caching import default_cache

    cache = args.cache or default_cache()
    if args.what in ("pull", "run"):
        finder = _finder(args, cache)
        return await (_pull(args, finder) if args.what == "pull" else _run(args, finder))
    store = ImageStore(cache / "images")
    return _list(store, as_json=args.json) if args.what == "list" else await _remove(args, store)


def _finder(args: argparse.Namespace, cache: Path) -> ImageFinder:
    from openhands_rl_plugin.evals.images.manifests import Platform
    from openhands_rl_plugin.evals.runs.backends import find_images

    wanted = Platform.parse(args.platform) if args.platform else Platform.here()
    return find_images(cache, args.images, image_limits(args), wanted)


async def _pull(args: argparse.Namespace, finder: ImageFinder) -> int:
    from openhands_rl_plugin.evals.images.references import Reference

    if args.name and len(args.images_wanted) > 1:
        raise ConfigError("--name is for one image")
    for wanted in args.images_wanted:
        is_file = wanted.startswith((".", "/", "~")) or Path(wanted).exists()
        if args.name and not is_file:
            raise ConfigError(f"--name is for images in files; {wanted} has its name")
        with finder.store.in_use():
            if is_file:
                image = await finder.from_file(Path(wanted).expanduser(), args.name, _tell)
            elif args.images and "://" not in args.images:
                image = await finder.find(wanted, _tell)
            else:
                image = await finder.from_registry(Reference.parse(wanted), _tell)
        print(f"{wanted}: {image.short}, {_size(image.size)} in {len(image.layers)} layers")
    return 0


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


def _list(store: ImageStore, *, as_json: bool) -> int:
    images = store.images()
    if as_json:
        rows = [{**image.model_dump(mode="json", exclude={"config"}), "names": _names(image)} for image in images]
        print(json.dumps({"images": rows, "bytes": store.on_disk()}, indent=1))
        return 0
    for image in images:
        print(f"{image.short}  {_size(image.size):>9}  {', '.join(_names(image)) or '(without a name)'}")
    print(f"{len(images)} images, {_size(store.on_disk())} on the disk (layers that several have count once)")
    return 0


async def _remove(args: argparse.Namespace, store: ImageStore) -> int:
    if bool(args.names) == args.all:
        raise ConfigError("say which images, or --all")
    images = store.images() if args.all else [_known(store, name) for name in args.names]
    freed = await store.remove(images)
    print(f"{len({image.id for image in images})} images removed, {_size(freed)} freed")
    return 0


def _known(store: ImageStore, name: str) -> StoredImage:
    from openhands_rl_plugin.evals.images.references import Reference

    found = store.find(name)
    if found is None:
        found = store.find(str(Reference.parse(name)))
    if found is None:
        raise ConfigError(f"there is no image {name}; `openhands-rl images list` says which there are")
    return found


async def _run(args: argparse.Namespace, finder: ImageFinder) -> int:
    from openhands_rl_plugin.evals.images.sandbox import ImageSandbox, fresh_root
    from openhands_rl_plugin.evals.swe.backends.caching import remove
    from openhands_rl_plugin.evals.swe.backends.sandbox import check_bubblewrap

    check_bubblewrap()
    with finder.store.in_use():
        image = finder.store.find(args.image) or await finder.find(args.image, _tell)
        words = args.program[args.program[:1] == ["--"] :] or list(image.config.command)
        if not words:
            raise ConfigError(f"{args.image} has no command of its own; give one after --")
        scratch = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=finder.store.runs))
        try:
            files = scratch / "files"
            files.mkdir()
            fresh = await fresh_root(image, files)
            options = {"workdir": args.workdir, "user": args.user, "network": args.network}
            process = await asyncio.create_subprocess_exec(*ImageSandbox().wrap(fresh, words, **options))
            try:
                return await process.wait()
            finally:
                if process.returncode is None:
                    process.terminate()
                    await process.wait()
        finally:
            await remove(scratch)


def _names(image: StoredImage) -> list[str]:
    from openhands_rl_plugin.evals.images.finding import FILE

    return [name for name in image.names if not name.startswith(FILE)]


def _size(count: int) -> str:
    return f"{count / 1024**2:,.1f} MiB" if count < 1024**3 else f"{count / 1024**3:,.2f} GiB"
