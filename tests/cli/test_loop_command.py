"""``openhands-rl loop``: the closed loop from a configuration file, over a shop and a tiny random model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from counted_reward import ASKED, CountedReward
from needs import needs_contrib
from scripted_model import reply as answer
from scripted_model import serve
from shopper_model import shop_and_server
from shopping_loop import MODEL, write_talker
from train_store import stored

from openhands_rl_plugin import cli
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.evals.runs.run_files import held
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.training.algorithms import off_policy_sampling
from openhands_rl_plugin.training.loop.plan import LoopState
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer

pytestmark = pytest.mark.contract
Capture = pytest.CaptureFixture[str]

HOLDING = """
import sys
from pathlib import Path
from openhands_rl_plugin.evals.runs.run_files import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
SLOW = pytest.mark.slow
STAGES = ["evaluate-base", "iteration-000", "iteration-001", "evaluate-final"]


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_talker(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="module")
def served(talker: Path) -> Iterator[tuple[str, str]]:
    """The URLs of a small shop and of a model server."""
    with shop_and_server(talker, MODEL) as urls:
        yield urls


def write_config(folder: Path, *, shop: str = "", server: str = "", more: str = "") -> Path:
    """Two iterations of two tasks, three episodes each."""
    file = folder / "config.toml"
    file.write_text(f"""
[rl]
env_name = "webshop"
{f'env_server_base = "{shop}"' if shop else ""}
react_format = false
max_turns = 2
max_prompt_length = 3500
max_response_length = 8
max_workers = 6
[rl.reward]
name = "counted_reward:CountedReward"
[rl.storage]
path = "{folder / "trajectories"}"
durable = false
[rl.training]
dtype = "float32"
lora_rank = 4
lora_alpha = 8
batch_size = 6
num_epochs = 1
learning_rate = 1e-3
[rl.loop]
iterations = 2
tasks_per_iteration = 2
samples_per_task = 3
held_out = 2
[rl.serving]
{f'base_url = "{server}/v1"' if server else ""}
model = "{MODEL}"
adapter = "{folder.name.replace("_", "-")}"
adapters_path = "{folder / "adapters"}"
{more}
""")
    return file


def words(config: Path, *more: str) -> list[str]:
    run = ["--run-dir", str(config.parent / "run"), "--processes", "0"]
    return ["loop", "environment", "--config", str(config), "--tasks", "6", *run, *more]


def interrupt_after(stage: str, state_file: Path) -> threading.Thread:
    """Presses Ctrl-C when the stage is finished."""

    def watch() -> None:
        while LoopState.load(state_file).record(stage) is None:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["sync", pytest.param("async", marks=SLOW)])
def test_an_interrupted_run_goes_on_where_it_was(
    kind: str, served: tuple[str, str], talker: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, shop=served[0], server=served[1])
    command, state_file = words(config, "--set", f"loop.kind={kind}"), tmp_path / "run" / "state.json"
    watching = interrupt_after("iteration-000", state_file)
    assert cli.main(command) == 130
    watching.join()
    output = capfd.readouterr()
    assert "interrupted; finished stages are kept" in output.err
    finished = LoopState.load(state_file).records
    assert [record.name for record in finished][:2] == STAGES[:2] and len(finished) < len(STAGES)

    assert cli.main(command) == 0
    state = LoopState.load(state_file)
    assert state.records[: len(finished)] == finished and [record.name for record in state.records] == STAGES
    printed = capfd.readouterr().out
    assert "Held-out tasks" in printed and f"in use: {state.adapter}" in printed
    assert "After RL against the base model: " in printed and "2 tasks in both evaluations" in printed

    adapters = AdapterStore(tmp_path / "adapters")
    assert state.adapter is not None and adapters.get(state.adapter).base_model == MODEL
    assert state.adapter in httpx.get(f"{served[1]}/v1/models").text
    episodes = stored(tmp_path / "trajectories")
    assert len({trajectory.id for trajectory, _ in episodes}) == len(episodes) >= 2 + 2 * 6 + 2
    assert {trajectory.policy.base_model for trajectory, _ in episodes} == {MODEL}
    assert not any(off_policy_sampling(trajectory) for trajectory, _ in episodes), "`train` may learn from them, too"
    learnt = {
        trajectory.id: [score.reward_version for score in scores]
        for trajectory, scores in episodes
        if "/evaluate-" not in trajectory.run_id
    }
    taken = [versions for versions in learnt.values() if CountedReward.version in versions]
    assert len(taken) == 12 and all(sorted(versions) == ["counted-vowels-1", "return-1"] for versions in taken)
    assert {ASKED[identity] for identity, versions in learnt.items() if versions} == {1}, "judged once"

    where = ["--model", str(talker), "--adapters", str(tmp_path / "adapters"), "--adapter", state.adapter[:-8]]
    assert cli.main(["train", str(tmp_path / "trajectories"), *where, "--algorithm", "grpo", "--dry-run"]) == 1, (
        "all returns are equal"
    )
    assert "left out: 4 held out" in capfd.readouterr().err, "what the run measured with is not learnt from later"

    assert cli.main([*command, "--set", "loop.samples_per_task=4"]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "other options (rl.loop.samples_per_task; see options.json there)" in line and "--fresh" in line


@pytest.mark.timeout(400)
def test_a_run_goes_on_from_an_adapter_that_is_there(
    served: tuple[str, str], talker: Path, tmp_path: Path, capsys: Capture
) -> None:
    config = write_config(tmp_path, shop=served[0], server=served[1])
    learnt = words(config, "--set", "loop.iterations=1", "loop.held_out=1")
    assert cli.main([*learnt, "--from", "latest"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --from latest: ") and "available: none" in line
    adapters, training = AdapterStore(tmp_path / "adapters"), load_settings(config).training
    name = load_settings(config).serving.adapter
    first = adapters.create(name, LocalTrainer(talker, training).save_adapter, base_model=MODEL).name

    command = [*learnt, "--run-dir", str(tmp_path / "next"), "--from", "latest"]
    assert cli.main([*command, "--dry-run"]) == 0
    assert f"starting from {first}" in capsys.readouterr().out
    assert cli.main(command) == 0
    state = LoopState.load(tmp_path / "next" / "state.json")
    assert state.start == first and state.records[0].adapter == first
    assert state.adapter is not None and adapters.get(state.adapter).parent == first
    assert f"After RL against {first}: " in (printed := capsys.readouterr().out)
    assert Path(printed.rpartition("; report: ")[2].strip()).is_file(), "with the studio that writes it, and without"
    run_id = (tmp_path / "next" / "run_id").read_text()
    measured = [t for t, _ in stored(tmp_path / "trajectories") if t.run_id == f"{run_id}/evaluate-base"]
    assert measured and {trajectory.policy.served_name for trajectory in measured} == {first}

    # A run that goes on has its own beginning, whatever is the latest by now.
    assert cli.main(command) == 0
    assert LoopState.load(tmp_path / "next" / "state.json") == state
    capsys.readouterr()
    config.write_text(config.read_text().replace("lora_alpha = 8", "lora_alpha = 16"))
    assert cli.main([*learnt, "--run-dir", str(tmp_path / "other"), "--from", "1"]) == 1
    assert "lora_alpha = 8, and [rl.training] has 16: set lora_alpha = 8" in capsys.readouterr().err
    assert not (tmp_path / "other" / "state.json").exists()


WRONG = [
    ([], "", "no model is given: give its folder with --model, or its server as base_url in [rl.serving]"),
    (["--model", "nowhere"], "", "--model nowhere: this is not the folder of a model"),
    (["--model", "MODEL", "--set", "loop.held_out=6"], "", "too few tasks: 0 to train on, 6 held out"),
    (["--model", "MODEL", "--set", "rollout_strategy=BestOfN"], "", 'set [rl.training] tree = "proposals"'),
    (["--model", "MODEL"], '[rl.training]\nmethod = "full"', "which no running server loads: `train` it"),
    (["--model", "MODEL"], '[rl.reward]\nname = "verifier"', "reward 'verifier': adapter: is required"),
]


@pytest.mark.parametrize(("options", "more", "expected"), WRONG, ids=[expected[:30] for *_, expected in WRONG])
def test_wrong_input_is_one_line(
    options: list[str], more: str, expected: str, talker: Path, tmp_path: Path, capsys: Capture
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f"[rl]\nreact_format = false\n[rl.loop]\nheld_out = 2\n{more}\n")
    given = [str(talker) if word == "MODEL" else word for word in options]
    assert cli.main([*words(config), *given]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and expected in line
    assert not (tmp_path / "run").exists()


def test_a_second_process_is_kept_from_a_run(talker: Path, tmp_path: Path, capsys: Capture) -> None:
    """Whoever holds the directory's lock is at work there; --fresh does not take its state from under it."""
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "state.json").write_text("{}")
    given = [*words(write_config(tmp_path)), "--model", str(talker)]
    first = subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(directory)], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    assert first.stdout is not None and first.stdout.readline() == b"held\n"
    try:
        assert cli.main([*given, "--run-dir", str(directory), "--fresh"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{directory}: another process runs here" in line and "--run-dir" in line
        assert (directory / "state.json").exists() and not (directory / "options.json").exists()
    finally:
        first.kill()
        first.communicate()
    with held(directory):
        pass  # a killed process holds nothing


@pytest.mark.parametrize("field", ["return_token_ids", "logprobs"])
def test_a_server_that_sends_nothing_to_train_on_is_refused_at_the_first_batch(
    field: str, served: tuple[str, str], talker: Path, tmp_path: Path, capsys: Capture
) -> None:
    with serve() as deaf:

        def ignores(body: dict[str, object]) -> dict[str, object]:
            del body[field]
            return answer("click[Back to Search]")

        deaf.context, deaf.policies[MODEL] = 4096, ignores
        deaf.script(MODEL, [])
        config = write_config(tmp_path, shop=served[0], server=deaf.url.removesuffix("/v1"), more='server = "vllm"')
        sizes = ("loop.held_out=1", "loop.iterations=1", "loop.tasks_per_iteration=1", "loop.samples_per_task=2")
        assert cli.main(words(config, "--model", str(talker), "--set", *sizes)) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert "2 without token ids or, to reinforce, logprobs (serve with" in line


@needs_contrib
def test_a_dry_run_shows_what_would_be_done(talker: Path, tmp_path: Path, capsys: Capture) -> None:
    command = ["loop", "webshop", "--config", str(write_config(tmp_path)), "--model", str(talker), "--dry-run"]
    command += ["--run-dir", str(tmp_path / "run")]
    assert cli.main([*command, "--set", "loop.demonstrations=5", "loop.kind=async"]) == 0
    printed = capsys.readouterr().out
    assert "1195 tasks to train on, 2 held out, 5 for demonstrations" in printed
    assert "stages: 7, 0 done" in printed and "by 3 episodes, async" in printed
    assert "by the embedded server" in printed and "'counted_reward:CountedReward'" in printed
    assert cli.main(["loop", "swe-local", *command[2:]]) == 0
    assert "swe-local: 52 tasks to train on, 2 held out" in capsys.readouterr().out
    assert not (tmp_path / "run").exists() and not (tmp_path / "trajectories").exists()
