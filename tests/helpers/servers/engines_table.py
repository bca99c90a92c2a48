"""Which engine does what: the table of docs/howto/trainers.md, from what the code declares and the tests show.

By ``ENGINES`` settings are refused; from ``SHOWN`` the tests of an engine take their algorithms, bounds and versions;
what else is told names the tests that show it. ``tests/training/trainer/test_engines.py`` holds the three together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from openhands_rl_plugin.config.engines import ATTENTION, ENGINES, MLP, Engine
from openhands_rl_plugin.config.training import AlgorithmName

ALGORITHMS: tuple[str, ...] = get_args(AlgorithmName)
_ADAPTER = ("lora_variant", "adapt_experts")
_METHODS = ("method",)


@dataclass(frozen=True)
class Shown:
    """What the tests of an engine show, beside the local trainer.

    ``packages``: the releases that are tested, and ``on`` in words; ``command`` runs the tests. ``gradients``:
    algorithms with the settings that the gradient of a batch is compared with, whose cosine is above ``cosine``.
    """

    on: str
    packages: Mapping[str, str]
    command: str
    gradients: Mapping[str, Mapping[str, object]]
    cosine: float


SHOWN: Mapping[str, Shown] = {
    "trl": Shown(
        on="TRL 1.16.0 on a processor, tiny Llama",
        packages={"trl": "1.16.0"},
        command=".ci/peers trl",
        gradients={
            **{name: {} for name in ("grpo", "reinforce++-baseline", "dr-grpo", "dapo", "gspo", "sft")},
            "rejection-sampling": {},
            "rloo": {"gradient_checkpointing": True},
            "cispo": {"cispo_low": 1.0},
            "reinforce++": {"correction": "truncate", "dual_clip": 3.0},
        },
        cosine=0.99999,
    ),
    "tinker": Shown(
        on="SkyRL 0.4.0 (JAX on a processor), client 0.25.0, tiny Llama",
        packages={"tinker": "0.25.0", "skyrl": "0.4.0"},
        command=".ci/peers tinker",
        gradients={
            **{name: {"old_logprobs": "recorded"} for name in ("reinforce++-baseline", "grpo", "cispo")},
            **{name: {"old_logprobs": "recorded"} for name in ("rloo", "dr-grpo", "dapo")},
            **{name: {} for name in ("gspo", "sft", "rejection-sampling", "dpo")},
            "reinforce++": {"correction": "truncate", "dual_clip": 3.0},
        },
        cosine=0.999,
    ),
}

FIRST_UPDATE = 0.99
"""The least cosine between the first updates by two engines, from one SFT adapter in the shop."""
RISE = 0.1
"""By how much more the last of three iterations earns than the first, at least."""


@dataclass(frozen=True)
class Row:
    """``cells``: by engine; ``by``: the tests that show them."""

    title: str
    cells: Mapping[str, str]
    by: tuple[str, ...] = field(default=(), kw_only=True)


_LOCAL, _RESUME = "trainer/test_trainer_algorithms.py", "trainer/test_resume.py"
_TRL, _TRL_ROWS = "trl/test_trl_trainer.py", "trl/test_trl_rows.py"
_TINKER, _SERVER = "tinker/test_tinker_trainer.py", "tinker/test_tinker_server.py"
_SAME = "the same"

TOLD = (
    Row(
        "losses",
        {
            "local": "its own",
            "trl": "TRL's GRPO loss; `gspo` with one advantage a sequence",
            "tinker": "the service's PPO, CISPO and likelihood; `gspo`, `dpo`, `dual_clip` and `correction` by one "
            "more forward pass",
        },
        by=(
            f"{_LOCAL}::test_the_loss_is_the_papers_and_passes_do_not_change_it",
            f"{_TRL_ROWS}::test_a_correction_for_stale_tokens_is_in_the_advantages",
            f"{_TRL_ROWS}::test_the_clip_is_trls",
            f"{_TINKER}::test_it_trains_as_the_local_trainer_does",
        ),
    ),
    Row(
        "segments of an episode",
        {"local": "each a sequence, one weight for the rollout", "trl": _SAME, "tinker": _SAME},
        by=(
            f"{_LOCAL}::test_each_segment_of_a_rollout_has_its_own_ratio_in_gspo_and_the_rollout_one_weight",
            f"{_TRL_ROWS}::test_segments_of_a_rollout_are_rows_with_the_weight_of_one",
            f"{_TRL}::test_gradient_and_weights_are_those_of_the_local_trainer",
            f"{_SERVER}::test_the_gradient_is_that_of_the_local_trainer",
        ),
    ),
    Row(
        "stale correction",
        {
            "local": "`correction`, `old_logprobs`",
            "trl": "the same, as factors of TRL's advantages",
            "tinker": _SAME,
        },
        by=(
            f"{_LOCAL}::test_stale_rollouts_are_weighed_against_the_policy_as_it_was",
            f"{_TRL_ROWS}::test_a_correction_for_stale_tokens_is_in_the_advantages",
            f"{_TINKER}::test_it_trains_as_the_local_trainer_does",
        ),
    ),
    Row(
        "micro-batches",
        {
            "local": "packed, prefixes shared",
            "trl": "one sequence each, slower where prefixes are common",
            "tinker": "the service's own",
        },
        by=(
            f"{_LOCAL}::test_packed_is_unpacked",
            f"{_TRL_ROWS}::test_steps_have_as_many_rows_each",
        ),
    ),
    Row(
        "clipping of gradients",
        {"local": "yes", "trl": "yes", "tinker": "asked of the server; SkyRL's JAX back end does not"},
        by=(
            "trainer/test_trainer.py::test_gradients_are_those_of_transformers_and_peft",
            f"{_TRL}::test_gradient_and_weights_are_those_of_the_local_trainer",
            f"{_SERVER}::test_this_server_does_not_clip_gradients",
        ),
    ),
    Row(
        "several processes",
        {
            "local": "`torchrun` or `nproc_per_node`, FSDP2, context parallelism",
            "trl": "`torchrun`, a whole model each",
            "tinker": "the service's own",
        },
        by=(
            "distributed/test_distributed.py::test_split_layers_train_what_whole_ones_do",
            "distributed/test_context_parallel.py::test_with_split_layers",
            f"{_TRL}::test_two_processes_train_as_one",
        ),
    ),
    Row(
        "resume",
        {"local": "optimiser steps", "trl": _SAME, "tinker": "the same, from the service's checkpoints"},
        by=(
            f"{_RESUME}::test_a_killed_run_ends_bit_by_bit_as_one_that_was_not",
            f"{_TRL}::test_a_killed_call_continues_from_its_last_checkpoint",
            f"{_SERVER}::test_a_killed_call_goes_on_from_its_checkpoint_at_the_server",
        ),
    ),
    Row(
        "shown besides",
        {
            "local": "",
            "trl": "weights after eight steps; a loop killed and continued; two processes train as one",
            "tinker": "a server that averages where it should sum is found before anything is trained",
        },
        by=(
            f"{_TRL}::test_gradient_and_weights_are_those_of_the_local_trainer",
            "trl/test_trl_loop.py::test_a_loop_trains_by_trl_and_goes_on_after_a_kill",
            f"{_TRL}::test_two_processes_train_as_one",
            f"{_SERVER}::test_a_server_that_averages_is_found_before_anything_is_trained",
        ),
    ),
)
"""Cells that no data is behind. Tests are below ``tests/training``."""


def table() -> str:
    """The table, with an empty line before it."""
    losses, *others, besides = TOLD
    rows = [
        Row("algorithms", {name: _algorithms(engine) for name, engine in ENGINES.items()}),
        losses,
        *others,
        Row("LoRA", {name: _adapters(engine) for name, engine in ENGINES.items()}),
        Row("`full`, `qlora`", {name: _no(_METHODS[0] in engine.lacks) for name, engine in ENGINES.items()}),
        Row("refused with the settings", {name: _refused(engine) for name, engine in ENGINES.items()}),
        Row("temperature", {name: engine.temperatures for name, engine in ENGINES.items()}),
        Row("package", {name: f"`{engine.requires or 'torch'}`" for name, engine in ENGINES.items()}),
        Row("tested with", {name: _tested(name) for name in ENGINES}),
        Row("gradient of a batch", {name: _gradients(name) for name in ENGINES}),
        Row("three iterations in the shop, from one SFT adapter", {name: _learning(name) for name in ENGINES}),
        besides,
    ]
    lines = [["", *(f"`{name}`" for name in ENGINES)], ["---"] * (len(ENGINES) + 1)]
    lines += [[row.title, *(row.cells[name] for name in ENGINES)] for row in rows]
    return "\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _algorithms(engine: Engine) -> str:
    said = "all" if not engine.without else f"all but {_names(engine.without)}"
    given = [f"`{each.algorithm}` with `{each.key} = {each.values[0]}`" for each in engine.only if each.algorithm]
    return "; ".join([said, *given])


def _adapters(engine: Engine) -> str:
    said = [_bound(each.key, each.values) for each in engine.only if not each.algorithm]
    lacks = [key for key in _ADAPTER if key in engine.lacks]
    return "; ".join([*said, *([f"no {_names(lacks)}"] if lacks else [])]) or "all of `[rl.training]`"


def _bound(key: str, values: tuple[object, ...]) -> str:
    if key == "target_modules":
        known = {ATTENTION: "attention", MLP: "the MLPs", (*ATTENTION, *MLP): "both"}
        return f"`{key}`: {', '.join(known[value] for value in values if isinstance(value, tuple))}"
    return f"`{key} = {values[0]}`"


def _refused(engine: Engine) -> str:
    return _names([key for key in engine.lacks if key not in (*_ADAPTER, *_METHODS)]) or "nothing"


def _tested(name: str) -> str:
    return f"{SHOWN[name].on}: `{SHOWN[name].command}`" if name in SHOWN else "torch, by the fast tests"


def _gradients(name: str) -> str:
    if name not in SHOWN:
        return "that of transformers, PEFT and autograd alone"
    shown = SHOWN[name]
    batch = f"segments and whole episodes, all 28 tensors, all {len(shown.gradients)} algorithms"
    return f"{batch}: cosine with `local` above {shown.cosine}"


def _learning(name: str) -> str:
    rise = f"reward up by more than {RISE}"
    return rise if name == "local" else f"{rise}; first update: cosine with `local` above {FIRST_UPDATE}"


def _no(lacks: bool) -> str:
    return "no, refused" if lacks else "yes"


def _names(keys: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)
