"""Images of instances for a container engine, from what the local back end set up: the same repository, environment
and commands at the same paths, on a plain Debian.

``base_image`` needs ``mmdebstrap`` (Debian's, as root) the first time; everything else is the ``docker`` program.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from openhands_rl_plugin.environments.workspace.processes import checked, run
from openhands_rl_plugin.evals.swe.backends import shim
from openhands_rl_plugin.evals.swe.backends.caching import Cache
from openhands_rl_plugin.evals.swe.backends.interpreters import Interpreter, find_python, find_uv
from openhands_rl_plugin.evals.swe.backends.local import LocalBackend
from openhands_rl_plugin.evals.swe.backends.sandbox import CONDA, PARTS, shim_digest
from openhands_rl_plugin.evals.swe.types import Instance

NAMES = "localhost/openhands-rl"
_PACKAGES = (
    *("git", "patch", "make", "gcc", "g++", "libc6-dev", "procps", "lsof", "ca-certificates", "locales", "tzdata"),
    *("libssl3", "libffi8", "libsqlite3-0", "libbz2-1.0", "liblzma5", "libreadline8", "zlib1g", "libncursesw6"),
)
_BUILDERS = (
    *("setuptools==72.1.0", "wheel==0.43.0", "setuptools-scm==8.1.0", "flit-core==3.9.0", "poetry-core==1.9.0"),
    *("packaging==24.1", "typing-extensions==4.12.2", "tomli==2.0.1"),
)
"""What the scripts of tests need without a network, where they install a project again."""
_TIME = 3600.0
_VARIABLES = {
    "DEBIAN_FRONTEND": "noninteractive",
    "HOME": "/root",
    "PIP_NO_INDEX": "1",
    "TZ": "Etc/UTC",
    "UV_NO_CACHE": "1",
    "UV_OFFLINE": "1",
    "UV_FIND_LINKS": "/opt/wheelhouse",
    "UV_PYTHON_DOWNLOADS": "never",
    "SHIM_UV": f"{CONDA}/bin/uv",
    "SHIM_EXCLUDE_NEWER": "",
    "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "GIT_CONFIG_KEY_1": "gc.auto",
    "GIT_CONFIG_VALUE_1": "0",
}


async def debian_image(program: str) -> str:
    """The image of a plain Debian, made when missing."""
    name = f"{NAMES}/debian:bookworm"
    if (await run([program, "image", "inspect", name])).code:
        with tempfile.TemporaryDirectory(prefix="openhands-rl-") as folder:
            archive = Path(folder, "debian.tar")
            make = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(_PACKAGES)}", "bookworm"]
            await checked([*make, str(archive)], "make a Debian by mmdebstrap", timeout=_TIME)
            await checked([program, "import", str(archive), name], "import Debian", timeout=_TIME)
    return name


async def base_image(program: str, interpreter: Interpreter) -> str:
    """The image of Debian with what the sandbox shows of this machine: Python, uv and the shim. Made when missing."""
    base = f"{NAMES}/base:{interpreter.program.name}-{shim_digest()}"
    if (await run([program, "image", "inspect", base])).code == 0:
        return base
    plain = await debian_image(program)
    folder = Path(shim.__file__).parent
    places = {str(prefix): str(prefix) for prefix in (interpreter.prefix, _own().prefix)}
    places |= {str(folder): f"{CONDA}/shim", str(folder / "activate.sh"): f"{CONDA}/bin/activate"}
    places |= {str(find_uv()): f"{CONDA}/bin/uv"}
    links = {f"{CONDA}/host-python": str(_own().program), f"{CONDA}/envs": PARTS["conda"]}
    with tempfile.TemporaryDirectory(prefix="openhands-rl-") as wheels:
        pip = [str(interpreter.program), "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={wheels}"]
        await checked([*pip, *_BUILDERS], "get what builds projects", timeout=_TIME)
        await build_image(program, plain, base, {**places, wheels: "/opt/wheelhouse"}, links, _VARIABLES)
    return base


async def instance_image(program: str, backend: LocalBackend, cache: Path, instance: Instance, python: str) -> str:
    """The image of one instance, made when missing. ``python``: the version that its recipe wants."""
    name = f"{NAMES}/{instance.instance_id.lower()}:latest"
    layer = await backend.prepare(instance)
    if (await run([program, "image", "inspect", name])).code == 0:
        return name
    places = {str(layer / part): inside for part, inside in PARTS.items() if (layer / part).exists()}
    places |= {str(Cache(cache).path("shims", shim_digest())): f"{CONDA}/shims"}
    variables = {"SHIM_PYTHON": str(find_python(python).program)}
    await build_image(program, await base_image(program, find_python(python)), name, places, {}, variables)
    return name


async def remove_image(program: str, name: str) -> None:
    """Remove an image of an instance."""
    await run([program, "image", "rm", "--force", name], timeout=_TIME)


async def build_image(
    program: str,
    image: str,
    name: str,
    places: Mapping[str, str],
    links: Mapping[str, str],
    variables: Mapping[str, str],
    *,
    entrypoint: Sequence[str] = (),
) -> None:
    """Make the image ``name``: ``image`` with folders and files of this machine (path -> path inside) and links."""
    with tempfile.TemporaryDirectory(prefix="openhands-rl-", dir=os.environ.get("TMPDIR", "/var/tmp")) as folder:
        context, tree = Path(folder, "context"), Path(folder, "links")
        context.mkdir()
        for inside, target in links.items():
            link = tree / inside.lstrip("/")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)
        lines = [f"FROM {image}", *(f'ENV {key}="{value}"' for key, value in variables.items())]
        for number, (outside, inside) in enumerate([*([(str(tree), "")] if links else []), *places.items()]):
            source, target = Path(outside), inside.lstrip("/") or "."
            # An archive keeps owners, modes, times and links.
            pack = ["tar", "--create", f"--file={context}/{number}.tar", "--numeric-owner", "--owner=0", "--group=0"]
            pack += [f"--directory={source.parent}", f"--transform=s,^{source.name},{target},rSh", source.name]
            await checked(pack, f"pack {outside}", timeout=_TIME)
            lines.append(f"ADD {number}.tar /")
        lines += [f"ENTRYPOINT {json.dumps(list(entrypoint))}"] if entrypoint else []
        (context / "Dockerfile").write_text("\n".join(lines) + "\n")
        # The builder that needs nothing but the engine.
        variables = {**os.environ, "DOCKER_BUILDKIT": "0"}
        build = [program, "build", "--quiet", "--tag", name, str(context)]
        await checked(build, f"build {name}", timeout=_TIME, variables=variables)


def _own() -> Interpreter:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Interpreter(Path(sys.base_prefix) / "bin" / f"python{version}", Path(os.path.realpath(sys.base_prefix)))
