"""Episodes of OpenHands by the classes of the installed SkyRL: a batch, its advantages, and what is refused.

``.ci/peers skyrl`` puts SkyRL beside this package; the trainer's own methods run here, its workers need a GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from needs import needs_bubblewrap
from scripted_model import ScriptedModel, call, reply, serve, with_prompt_ids

from openhands_rl_plugin.contrib.repair.rows import repair_instances
from openhands_rl_plugin.core.errors import ConfigError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("skyrl") is None, reason="needs SkyRL: .ci/peers skyrl"),
    pytest.mark.timeout(600),
]

INSTANCE = repair_instances(1, "heldout")[0]
STEPWISE = ("generator.step_wise_trajectories=true", "trainer.policy.model.path=base")


def configured(*words: str) -> Any:
    from openhands_rl_plugin.contrib.trainers.skyrl import OpenHandsTrainConfig

    return OpenHandsTrainConfig.from_cli_overrides(["trainer.placement.colocate_all=false", *words])


def batch(cfg: Any, tasks: list[Any], samples: int, phase: str = "train") -> Any:
    """As SkyRL's trainer asks for it: rows of its data set, and the sampling of its configuration."""
    from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
    from skyrl.train.generators.utils import prepare_generator_input

    rows = [
        {"prompt": [{"role": "user", "content": "?"}], "env_class": None, "env_extras": {"task": task}, "uid": str(at)}
        for at, task in enumerate(tasks)
    ]
    sampling = get_sampling_params_for_backend(cfg.generator.inference_engine.backend, cfg.generator.sampling_params)
    made, _ = prepare_generator_input(rows, samples, sampling, "openhands", phase, 1)
    return made


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    with serve() as server:
        yield server


def by_episode(*policies: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    """Another policy for each episode, one after the other."""
    current = iter(policies)
    playing = [gives_up]

    def answer(body: dict[str, Any]) -> Any:
        if not any(each["role"] == "assistant" for each in body["messages"]):
            playing[0] = next(current)
        return playing[0](body)

    return answer


def repairs(body: dict[str, Any]) -> Any:
    if sum(each["role"] == "assistant" for each in body["messages"]):
        return gives_up(body)
    mend = f"git apply <<'EOF'\n{INSTANCE.patch}\nEOF"
    return reply(None, call("execute_bash", {"command": mend, "security_risk": "LOW"}))


def gives_up(body: dict[str, Any]) -> Any:
    return reply(None, call("finish", {"message": "Done.", "task_completed": "true"}))


def without_ids(body: dict[str, Any]) -> Any:
    return with_prompt_ids(gives_up(body), None)


def generator(cfg: Any, model: ScriptedModel) -> Any:
    from openhands_rl_plugin.contrib.trainers.skyrl import OpenHandsGenerator

    return OpenHandsGenerator(cfg, model.url.removesuffix("/v1"))


@needs_bubblewrap
async def test_a_batch_has_the_advantages_of_its_valid_episodes(model: ScriptedModel):
    """By SkyRL's own validation, tensors and GRPO: who failed is in no baseline, and who is alone teaches nothing."""
    from skyrl.train.trainer import RayPPOTrainer

    cfg = configured(
        *STEPWISE,
        "openhands.concurrency=1",
        "openhands.options.suite=repair-1",
        "openhands.options.max_turns=4",
        "generator.n_samples_per_prompt=3",
        "trainer.train_batch_size=3",
        "trainer.policy_mini_batch_size=3",
        "trainer.algorithm.advantage_estimator=grpo",
    )
    # Three episodes of each prompt: solved, not, failed; alone among failures; none that is valid.
    model.policies["base"] = by_episode(
        *(repairs, gives_up, without_ids), *(without_ids, repairs, without_ids), *(without_ids,) * 3
    )
    trainer = object.__new__(RayPPOTrainer)  # its workers are what needs a GPU
    trainer.cfg, trainer.all_metrics = cfg, {}
    trainer.tokenizer, trainer.dispatch = SimpleNamespace(pad_token_id=0), SimpleNamespace(get_lcm_dp_size=lambda: 1)
    trainer.generator = generator(cfg, model)
    output = await trainer.generate(batch(cfg, [INSTANCE.instance_id] * 3, 3))
    names = [each.instance_id for each in output["trajectory_ids"]]
    assert names == ["0", "0", "1", "2"] and output["is_last_step"] == [True] * 4
    assert output["rewards"] == pytest.approx([1.0, 0.0, 1.0, 2 / 3])
    assert trainer.all_metrics["openhands/failed"] == 6
    assert (
        trainer.all_metrics["openhands/groups_of_one"] == trainer.all_metrics["openhands/groups_without_episode"] == 1
    )
    data = trainer.convert_to_training_input(*trainer.postprocess_generator_output(output, names))
    data["values"] = None  # of a critic
    data = trainer.compute_advantages_and_returns(data)
    assert [bool(row.any()) for row in data["loss_mask"]] == [True, True, False, False]
    learnt = (data["advantages"] * data["loss_mask"]).numpy()
    assert learnt[0].max() == pytest.approx(1 / 2**0.5, abs=1e-4) and learnt[1].min() == pytest.approx(
        -(2**-0.5), abs=1e-4
    )
    assert not learnt[2:].any()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "set generator.step_wise_trajectories=true"),
        ((*STEPWISE, "generator.sampling_params.temperature=0.7"), "vLLM gives logprobs at temperature 1"),
    ],
)
def test_what_would_be_trained_wrongly_is_refused(words: tuple[str, ...], expected: str):
    from openhands_rl_plugin.contrib.trainers.skyrl import check_config

    with pytest.raises(ConfigError, match=expected):
        check_config(configured(*words))
