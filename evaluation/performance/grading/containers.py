"""The same patches on the same instances by the local back end and in containers: verdicts and outcomes, test by test.

An image of each instance is made from what the local back end set up (``images``). Gold patch and a patch that changes
nothing are graded by both back ends, with the guard, and the outcome of every test in both logs is compared. A line of
``--out`` holds what came of an instance; instances that have a line are not graded again. The engine is what
``--program`` reaches (``DOCKER_HOST`` for docker); ``.ci/containers`` starts one where podman is installed.

    python -m evaluation.performance.grading.containers rows.jsonl --mirror ./mirrors --cache ./cache --out same.jsonl
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

from evaluation.performance.grading.golds import NOTHING, chosen
from evaluation.performance.grading.images import instance_image, remove_image
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.evals.swe.backends.docker import DockerBackend, from_mirrors
from openhands_rl_plugin.evals.swe.backends.local import LocalBackend
from openhands_rl_plugin.evals.swe.backends.repositories import MirrorSource
from openhands_rl_plugin.evals.swe.dataset import read_instances, read_rows
from openhands_rl_plugin.evals.swe.guard.guard import RewardHackGuard
from openhands_rl_plugin.evals.swe.protocols import InstanceBackend
from openhands_rl_plugin.evals.swe.recipes.base import Recipe
from openhands_rl_plugin.evals.swe.recipes.parsers import parser_of
from openhands_rl_plugin.evals.swe.recipes.recipe_of import recipe_of
from openhands_rl_plugin.evals.swe.types import Instance


async def graded(
    backend: InstanceBackend, row: Instance, recipe: Recipe, patches: Mapping[str, str], logs: Path, timeout: float
) -> dict[str, JsonObject]:
    """For each patch the verdict, and the outcome of every test in its log."""
    found: dict[str, JsonObject] = {}
    for name, patch in patches.items():
        folder = logs / backend.name / name
        verdict = await backend.grade(row, patch, logs=folder, timeout=timeout)
        log = folder / "test_output.txt"
        statuses = parser_of(recipe.parser)(log.read_text()) if log.exists() else {}
        said: JsonObject = {"kind": verdict.kind.value, "reason": verdict.reason, "flags": list(verdict.flagged)}
        found[name] = {**said, "seconds": round(verdict.seconds, 1), "tests": dict(statuses)}
    return found


def compared(local: Mapping[str, JsonObject], container: Mapping[str, JsonObject]) -> JsonObject:
    """What both say of each patch, and the tests with another outcome."""
    lines: JsonObject = {}
    for name, one in local.items():
        other = container[name]
        here, there = one.pop("tests"), other.pop("tests")
        assert isinstance(here, dict)
        assert isinstance(there, dict)
        differing = sorted(test for test in {*here, *there} if here.get(test) != there.get(test))
        lines[name] = {
            "same": one["kind"] == other["kind"] and one["flags"] == other["flags"],
            "tests": len(here),
            "differing": [f"{test}: {here.get(test)}, {there.get(test)}" for test in differing[:20]],
            "local": one,
            "container": other,
        }
    return lines


async def run(args: argparse.Namespace) -> None:
    """Compare what has no line yet."""
    mirrors = MirrorSource(args.mirror)
    here = LocalBackend(cache=args.cache, sources=[mirrors], guard=RewardHackGuard())
    there = DockerBackend(program=args.program, mirror=args.mirror, guard=RewardHackGuard(), memory="8g")
    await here.check()
    await there.check()
    done = {str(line["instance_id"]) for line in read_rows(args.out)} if args.out.exists() else set()
    rows = [row for row in chosen(read_instances(args.rows), args.ids, args.each) if row.instance_id not in done]
    recipes = {row.instance_id: await asyncio.to_thread(recipe_of, row, from_mirrors([mirrors])) for row in rows}
    for row in rows:
        recipe = recipes[row.instance_id]
        image = await instance_image(args.program, here, args.cache, row, recipe.python)
        logs = args.out.with_suffix(".logs") / row.instance_id
        patches = {"gold": row.patch, "nothing": NOTHING}
        ours = await graded(here, row, recipe, patches, logs, args.timeout)
        imaged = row.model_copy(update={"extra": {**row.extra, "image": image}})
        theirs = await graded(there, imaged, recipe, patches, logs, args.timeout)
        line = {"instance_id": row.instance_id, "repo": row.repo, **compared(ours, theirs)}
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line)[:400], flush=True)
        if args.remove:
            await remove_image(args.program, image)
    lines = list(read_rows(args.out))
    pairs = [pair for line in lines for name in ("gold", "nothing") if isinstance(pair := line[name], dict)]
    same = sum(pair["same"] is True for pair in pairs)
    alike = sum(not pair["differing"] for pair in pairs)
    print(f"{len(lines)} instances of {len({str(line['repo']) for line in lines})} repositories, {len(pairs)} patches:")
    print(f"{same} with the same verdict and flags, {alike} with the same outcome of every test")


def main() -> None:
    """Read the options and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--mirror", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--program", default="docker")
    parser.add_argument("--ids", nargs="*", default=[])
    parser.add_argument("--each", type=int, default=0, help="the first N rows of every repository")
    parser.add_argument("--timeout", type=float, default=1800.0)
    parser.add_argument("--remove", action="store_true", help="remove each image after its use")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
