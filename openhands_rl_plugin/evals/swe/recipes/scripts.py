"""What a recipe is, and its three scripts for rows whose scripts do not come from the ``swebench`` package.

The scripts run what the official ones run, command by command.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from typing import Literal

from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.swe.patches import restored_files
from openhands_rl_plugin.evals.swe.types import Instance

REPOSITORY = "/testbed"
ENVIRONMENT = "testbed"
START, END = ">>>>> Start Test Output", ">>>>> End Test Output"

_ACTIVATE = ("source /opt/miniconda3/bin/activate", f"conda activate {ENVIRONMENT}")
_PATCH_END, _FILE_END = "EOF_114329324912", "EOF_59812759871"

ReadFile = Callable[[str, str, str], str | None]
"""``(repo, commit, path)`` -> the file's text, or ``None`` when there is no such file.

Raises ``InfrastructureError`` when the repository is out of reach.
"""


class Recipe(Frozen):
    """Scripts as the official tools run them, in ``/bin/bash``, with the repository at ``/testbed``. Without the first
    two there is nothing but an image to run in.

    ``exclude_newer``: the date of which packages are installed, ``YYYY-MM-DD``; empty for today's. ``python``: a
    version as "3.9"."""

    environment_script: str
    install_script: str
    evaluation_script: str
    python: str
    parser: str
    eval_type: Literal["pass_and_fail", "fail_only"] = "pass_and_fail"
    exclude_newer: str = ""
    image: str | None = None


def environment_script(
    *,
    python: str | None,
    pip_packages: Iterable[str] = (),
    environment_yml: str | None = None,
    bare: bool = False,
) -> str:
    """Make the environment, from an ``environment.yml`` or from a Python and packages. ``bare``: without those that
    conda adds by itself.
    """
    lines = ["source /opt/miniconda3/bin/activate"]
    if environment_yml is None:
        more = " --no-default-packages" if bare else ""
        lines += [f"conda create -n {ENVIRONMENT} python={python} -y{more}", f"conda activate {ENVIRONMENT}"]
    else:
        lines += [f"cat <<'{_FILE_END}' > environment.yml\n{environment_yml}\n{_FILE_END}"]
        lines += ["conda env create --file environment.yml", f"conda activate {ENVIRONMENT}"]
        lines += [f"conda install python={python} -y"] if python else []
        lines += ["rm environment.yml"]
    if packages := " ".join(pip_packages):
        lines.append(f"python -m pip install {packages}")
    return _script("set -exo pipefail", lines)


def install_script(instance: Instance, commands: Iterable[str]) -> str:
    """Clone the repository and install it; what the commands changed becomes a commit of its own."""
    lines = [
        f"git clone -o origin https://github.com/{instance.repo} {REPOSITORY}",
        f"chmod -R 777 {REPOSITORY}",
        f"cd {REPOSITORY}",
        f"git reset --hard {instance.base_commit}",
        "git remote remove origin",
        *_ACTIVATE,
        *commands,
        "git config --global user.email setup@swebench.config",
        "git config --global user.name SWE-bench",
        "git commit --allow-empty -am SWE-bench",
    ]
    return _script("set -exo pipefail", lines)


def evaluation_script(
    instance: Instance, test_command: str, *, install: str | None = None, before: Iterable[str] = ()
) -> str:
    """Restore the test files, apply the row's test patch and run the tests, between the two markers."""
    files = " ".join(map(shlex.quote, restored_files(instance.test_patch)))
    restore = f"git checkout {instance.base_commit} {files}"
    lines = [
        *_ACTIVATE,
        f"cd {REPOSITORY}",
        *before,
        f"git config --global --add safe.directory {REPOSITORY}",
        f"cd {REPOSITORY}",
        "git status",
        "git show",
        f"git -c core.fileMode=false diff {instance.base_commit}",
        *_ACTIVATE,
        *([install] if install else []),
        restore,
        f"git apply -v - <<'{_PATCH_END}'\n{instance.test_patch}\n{_PATCH_END}",
        f": '{START}'",
        test_command,
        f": '{END}'",
        restore,
    ]
    return _script("set -xo pipefail", lines)


def _script(options: str, lines: Iterable[str]) -> str:
    return "\n".join(["#!/bin/bash", options, *lines]) + "\n"
