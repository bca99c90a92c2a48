"""Files of container images that are made here of this machine's programs: nothing is downloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

from openhands_rl_plugin.evals.swe import shim
from openhands_rl_plugin.evals.swe.backends import CONDA, PARTS, PROGRAMS

PYTHON = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
_PROGRAMS = (
    "bash sh git patch find sleep cat rm head tail mkdir ls id env chmod grep sed pwd cp dirname basename seq "
    "pkill ps lsof sort tar wc tr true uname touch ln mv"
)


def small_linux(root: Path) -> None:
    """The programs with their libraries, and the Python that runs this, below ``root``."""
    for name in ("bin", "lib", "lib64", "sbin"):
        if os.path.islink(f"/{name}"):
            (root / os.readlink(f"/{name}")).mkdir(parents=True, exist_ok=True)
            (root / name).symlink_to(os.readlink(f"/{name}"))
    library = Path(sys.base_prefix, "lib", PYTHON.name)
    skipped = shutil.ignore_patterns("test", "site-packages", "__pycache__", "idlelib", "tkinter", "ensurepip")
    shutil.copytree(library, root / str(library)[1:], ignore=skipped)
    programs = [found for name in _PROGRAMS.split() if (found := shutil.which(name, path="/usr/bin:/bin"))]
    encodings = [*glob("/usr/lib*/*/gconv/UTF-16.so"), *glob("/usr/lib*/*/gconv/gconv-modules*")]
    wanted = [*programs, str(PYTHON), *map(str, library.glob("lib-dynload/*.so")), *filter(os.path.isfile, encodings)]
    needed = subprocess.run(["ldd", *wanted], capture_output=True, text=True).stdout
    wanted += [word for line in needed.splitlines() for word in line.split() if word[0] == "/" and word[-1] != ":"]
    for name in wanted:
        place = root / str(Path(os.path.realpath(Path(name).parent), Path(name).name))[1:]
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(name, place)
    for name in ("tmp", "root", "etc", "dev", "proc"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")


def instance_linux(root: Path, layer: Path) -> None:
    """The same with what the local back end set up, at the same paths, and what its sandbox has instead of conda."""
    small_linux(root)
    for part, inside in PARTS.items():
        shutil.copytree(layer / part, root / inside[1:], symlinks=True, dirs_exist_ok=True)
    conda, folder = root / CONDA[1:], Path(shim.__file__).parent
    shutil.copytree(folder, conda / "shim")
    for name in ("bin", "shims"):
        (conda / name).mkdir()
    shutil.copy(folder / "activate.sh", conda / "bin" / "activate")
    links = {f"shims/{name}": "../shim/programs.sh" for name in PROGRAMS} | {"envs": "/conda/envs"}
    for name, target in {**links, "host-python": str(PYTHON)}.items():
        (conda / name).symlink_to(target)


def import_image(program: str, root: Path, name: str) -> None:
    """Make an engine's image of a folder."""
    packed = subprocess.Popen(["tar", "--directory", root, "--create", "."], stdout=subprocess.PIPE)
    subprocess.run([program, "import", "-", name], stdin=packed.stdout, check=True, capture_output=True)
    packed.wait()
