"""The files for clusters say what today's commands understand."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from openhands_rl_plugin import cli
from openhands_rl_plugin.cli import evaluate, train
from openhands_rl_plugin.config.toml import load_settings

CLUSTER = Path(__file__).parents[2] / "evaluation" / "configs" / "cluster"
COMMANDS = {"train": train, "evaluate": evaluate}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_PER_TASK": "32",
    "HEAD_START": "0",
}


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The words of one of our commands, by its own parser; what it does not know ends the test."""
    name, *rest = words
    parser = argparse.ArgumentParser(exit_on_error=False)
    COMMANDS[name].add_arguments(parser)
    return parser.parse_args(rest)


def after(words: Sequence[str], *beginning: str) -> list[str]:
    """What follows ``beginning``, wherever that is."""
    for at in range(len(words)):
        if tuple(words[at : at + len(beginning)]) == beginning:
            return list(words[at + len(beginning) :])
    raise AssertionError(f"{beginning} is not in {words}")


def run_script(name: str, tmp_path: Path, *words: str, **variables: str) -> list[list[str]]:
    """The commands that a script gives, from doubles of SLURM's programs that only note their words."""
    programs = tmp_path / "programs"
    programs.mkdir()
    note = f'#!/bin/bash\nprintf "%s\\0" "$@" > "{tmp_path}/$$.$RANDOM.words"\n'
    for program, text in {"srun": note, "scontrol": "#!/bin/bash\necho node1\necho node2\n"}.items():
        (programs / program).write_text(text)
        (programs / program).chmod(0o700)
    environment = {**os.environ, **SLURM, **variables, "PATH": f"{programs}:{os.environ['PATH']}"}
    # What the script leaves running has its output, too: it is over when all of them are.
    subprocess.run(["bash", str(CLUSTER / name), *words], env=environment, check=True, timeout=60, capture_output=True)
    return [file.read_text().split("\0")[:-1] for file in tmp_path.glob("*.words")]


def test_training_on_slurm(tmp_path: Path) -> None:
    (words,) = run_script("train.sbatch", tmp_path, "--algorithm", "grpo", STORE="s", MODEL="m", ADAPTERS="a")
    launched = words[: words.index("-m")]
    assert launched[0] == "torchrun" and after(launched, "--nnodes")[0] == "2"
    assert after(launched, "--rdzv-endpoint") == ["node1:29500"]
    args = parsed(after(words, "-m", "openhands_rl_plugin.cli"))
    assert (args.store, args.model, args.set[0], args.algorithm) == ("s", Path("m"), "training.sharding=layers", "grpo")


def test_episodes_on_slurm(tmp_path: Path) -> None:
    variables = {"CONFIG": "c.toml", "STORE": "s", "MODEL": "m", "BASE_URL": "http://policy:8100/v1"}
    given = run_script("rollouts.sbatch", tmp_path, "--tasks", "5", **variables)
    assert sum("ray" in words for words in given) == 2, "a head, and the other nodes"
    (ours,) = (words for words in given if "openhands-rl" in words)
    args = parsed(after(ours, "openhands-rl"))
    assert (args.suite, args.processes, args.set[1], args.tasks) == ("environment", 8, "max_workers=128", 5)
    gives_something_to_compare(args)
    would_begin(after(ours, "openhands-rl"), tmp_path)


def would_begin(words: Sequence[str], tmp_path: Path) -> None:
    """Nothing of what can be known before the first episode speaks against it."""
    places = ["--config", str(CLUSTER / "rollouts.toml"), "--store", str(tmp_path / "store"), "--out", str(tmp_path)]
    assert cli.main([*words, *places, "--dry-run"]) == 0


def gives_something_to_compare(args: argparse.Namespace) -> None:
    """Several episodes of each task, not all the same, and whose episodes they are."""
    assert args.runs > 1 and args.set[0] == "sampling.temperature=1.0"
    assert load_settings(CLUSTER / "rollouts.toml").serving.model


def documents(name: str) -> Iterator[dict[str, Any]]:
    yield from yaml.safe_load_all((CLUSTER / name).read_text())


def test_training_on_kubernetes() -> None:
    service, job = documents("train-job.yaml")
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    words = container["command"]
    options = dict(word.split("=", 1) for word in words if word.startswith("--") and "=" in word)
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(options["--nnodes"])
    assert int(options["--nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    # A pod of an indexed job is called by the job's name and its index, below the service's.
    names = (job["metadata"]["name"], service["metadata"]["name"], service["spec"]["ports"][0]["port"])
    assert options["--rdzv-endpoint"] == "{}-0.{}:{}".format(*names) and spec["subdomain"] == names[1]
    assert parsed(after(words, "-m", "openhands_rl_plugin.cli")).set[0] == "training.sharding=layers"


def test_episodes_on_kubernetes(tmp_path: Path) -> None:
    (job,) = documents("rollouts-rayjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    words = after(shlex.split(job["spec"]["entrypoint"]), "openhands-rl")
    would_begin(words, tmp_path)
    args = parsed(words)
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    # Each actor asks for one processor; the head has none to give.
    room = workers["replicas"] * int(container["resources"]["limits"]["cpu"])
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0" and args.processes <= room
    assert args.store.startswith(container["volumeMounts"][1]["mountPath"])
    gives_something_to_compare(args)
