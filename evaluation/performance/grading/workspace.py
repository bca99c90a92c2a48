"""OpenHands V1's ``DockerWorkspace`` on an image of an instance that was made here: a patch made in it is graded.

``--server-python`` is the Python of an environment with ``openhands-agent-server`` and ``openhands-workspace``, made
from the Python that runs this. Its folder is added to the instance's image (``images``). The workspace starts a
container of it, applies the gold patch to ``/testbed`` by its own commands and reads the difference, which the Docker
back end then grades.

    .ci/containers .venv/bin/python -m evaluation.performance.grading.workspace rows.jsonl --id pallets__flask-5014 \\
        --mirror ./mirrors --cache ./cache --server-python PY
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

from evaluation.performance.grading.golds import chosen
from evaluation.performance.grading.images import NAMES, build_image, instance_image
from openhands_rl_plugin.environments.workspace.processes import checked
from openhands_rl_plugin.evals.swe.backends.docker import DockerBackend, from_mirrors
from openhands_rl_plugin.evals.swe.backends.local import LocalBackend
from openhands_rl_plugin.evals.swe.backends.repositories import MirrorSource
from openhands_rl_plugin.evals.swe.dataset import read_instances
from openhands_rl_plugin.evals.swe.guard.guard import RewardHackGuard
from openhands_rl_plugin.evals.swe.recipes.recipe_of import recipe_of

_SCRIPT = """\
import json, sys
from pathlib import Path
from openhands.workspace import DockerWorkspace

image, patch, answer = sys.argv[1:]
with DockerWorkspace(server_image=image, working_dir="/testbed", detach_logs=False) as workspace:
    workspace.file_upload(patch, "/tmp/gold.patch")
    applied = workspace.execute_command("git apply --verbose /tmp/gold.patch", cwd="/testbed")
    found = workspace.execute_command("git diff HEAD", cwd="/testbed")
    Path(answer).write_text(json.dumps({"code": applied.exit_code, "said": applied.stderr, "patch": found.stdout}))
"""


async def run(args: argparse.Namespace) -> None:
    """Make the images, let the workspace work, and grade."""
    (row,) = chosen(read_instances(args.rows), [args.id], 1)
    mirrors = MirrorSource(args.mirror)
    recipe = await asyncio.to_thread(recipe_of, row, from_mirrors([mirrors]))
    here = LocalBackend(cache=args.cache, sources=[mirrors])
    image = await instance_image(args.program, here, args.cache, row, recipe.python)
    server = f"{NAMES}/server-{row.instance_id.lower()}:latest"
    folder = args.server_python.absolute().parent.parent
    start = [str(args.server_python.absolute()), "-m", "openhands.agent_server"]
    await build_image(args.program, image, server, {str(folder): str(folder)}, {}, {}, entrypoint=start)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="workspace-") as work:
        patch, answer = Path(work, "gold.patch"), Path(work, "answer.json")
        patch.write_text(row.patch)
        command = [str(args.server_python), "-c", _SCRIPT, server, str(patch), str(answer)]
        await checked(command, "DockerWorkspace", timeout=600)
        said = json.loads(answer.read_text())
        print(
            f"DockerWorkspace: {time.monotonic() - began:.1f} s, git apply {said['code']}, {len(said['patch'])} bytes"
        )
        there = DockerBackend(program=args.program, mirror=args.mirror, guard=RewardHackGuard(), memory="8g")
        imaged = row.model_copy(update={"extra": {**row.extra, "image": image}})
        verdict = await there.grade(imaged, said["patch"].rstrip("\n") + "\n", logs=Path(work, "logs"), timeout=1800.0)
        print(f"{row.instance_id}: {verdict.kind.value} {verdict.reason} {list(verdict.flagged)}")


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--id", required=True)
    parser.add_argument("--mirror", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--server-python", type=Path, required=True)
    parser.add_argument("--program", default="docker")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
