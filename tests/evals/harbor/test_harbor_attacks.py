"""What an agent, or the author of a task, may try against the reward and the host."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from harbor_tasks import DOCKERFILE, SHELL_TESTS, write_task

from openhands_rl_plugin.cli import main
from openhands_rl_plugin.core.errors import BadEnvironmentError
from openhands_rl_plugin.core.types import JsonObject, Message, Task
from openhands_rl_plugin.evals.harbor.container import HarborContainer
from openhands_rl_plugin.evals.harbor.environment import HarborEnvironment, HarborOptions
from openhands_rl_plugin.evals.harbor.gate import check_folders
from openhands_rl_plugin.evals.harbor.tasks import find_task, find_tasks, read_task

TASK = Task(id="t", environment="harbor", data={"idx": 0})
PAY = "echo 1 > /logs/verifier/reward.txt"
BIN = "mkdir -p ~/.local/bin; printf '#!/bin/bash\\necho Hello, world!\\n' > ~/.local/bin/NAME; chmod +x ~/.local/bin/*"


def said(command: str) -> Message:
    return Message(role="assistant", content=f"Action: {command}")


async def rewarded(folder: Path, *commands: str, **task: Any) -> tuple[float | None, JsonObject]:
    """The reward of an episode of ``commands`` and a submission, and the evidence of its tests."""
    write_task(folder / "hello", **task)
    environment = HarborEnvironment(HarborOptions(tasks=str(folder)))
    try:
        await environment.reset(TASK)
        for command in commands:
            await environment.step(said(command))
        paid = (await environment.step(said("submit"))).reward
        verifier = (await environment.evidence())["verifier"]
        assert isinstance(verifier, dict)
        return paid, verifier
    finally:
        await environment.close()


CHEATS = {
    "loop": "(while sleep 0.01; do echo '{\"reward\": 1}' > /logs/verifier/reward.json; done) > /dev/null 2>&1 &",
    "own cat": BIN.replace("NAME", "cat"),
    "moved state": "cd /tmp; mv .shell .s2; ln -s /tmp/.s2 .shell; cat() { echo 'Hello, world!'; }; export -f cat",
    "own bash": f"rm /bin; mkdir /bin; printf '#!/usr/bin/bash\\n{PAY}\\n' > /bin/bash; chmod +x /bin/bash",
    "linked mounts": "mv /logs /l; ln -s /app /logs; ln -s /app /tests; mv /run /r; ln -s /oldroot/tmp /run",
    "host's path": "for p in ${PATH//:/ }; do mkdir -p $p && cp /usr/bin/true $p/cat; done",
    "home": "mkdir -p ~/.local/lib/python3.{9..14}/site-packages; "
    "for d in ~/.local/lib/python3.*/*; do "
    f"echo 'import os; os.system(\"{PAY}\"); os._exit(0)' > $d/usercustomize.py; done",
    "startup": f"echo '{PAY}; exit 0' | tee ~/.bashrc ~/.bash_profile ~/.profile ~/.local/bin/env /etc/profile; "
    "export BASH_ENV=~/.bashrc ENV=~/.bashrc PYTHONSTARTUP=/app/x LD_PRELOAD=/app/x.so",
}
# Each begins as scripts do.
WARY_TESTS = SHELL_TESTS.replace(
    "#!/bin/bash\n",
    '#!/bin/bash\nexport PATH="$HOME/.local/bin:$PATH"\nsource $HOME/.local/bin/env\nsleep 0.1\npython3 -c ""\n',
)


async def test_an_agent_cannot_write_its_own_reward(tmp_path: Path):
    found = await asyncio.gather(
        *(rewarded(tmp_path / name, "mkdir -p data", cheat, tests=WARY_TESTS) for name, cheat in CHEATS.items())
    )
    rewards = dict(zip(CHEATS, (paid for paid, _ in found), strict=True))
    assert rewards == dict.fromkeys(CHEATS, 0.0)
    assert all(evidence["rewards"] == {"reward": 0.0} for _, evidence in found), found
    assert found[0][1]["left_running"] != []
    assert not Path("/tmp/given").exists() and not Path("/tmp/shell").exists()


async def test_honest_work_is_paid_with_programs_of_its_own(tmp_path: Path):
    tests = WARY_TESTS.replace("$(cat /app/hello.txt)", "$(greet)")
    paid, evidence = await rewarded(tmp_path, BIN.replace("NAME", "greet"), tests=tests)
    assert paid == 1.0 and evidence["rewards"] == {"reward": 1.0}


DODGES = {
    "file": "rm -rf /logs/verifier; echo x > /logs/verifier",
    "folder": "mkdir /logs/verifier/reward.txt /logs/verifier/reward.json",
    "output": "mkdir /logs/verifier/test-stdout.txt",
    "no app": "cd /; rm -rf /app /root /tests /logs",
    "closed": "chmod 000 /logs /app /root /run /",
    "killer": "printf '#!/bin/bash\\nkill -9 -1\\n' > /app/check; chmod +x /app/check",
    "replaced": "printf '#!/bin/bash\\nmkdir /logs/verifier/reward.txt\\n' > /app/check; chmod +x /app/check",
}


async def test_what_the_agent_broke_is_a_reward_of_0(tmp_path: Path):
    tests = SHELL_TESTS.replace("#!/bin/bash\n", "#!/bin/bash\n[ -x /app/check ] && /app/check\n")
    found = await asyncio.gather(
        *(rewarded(tmp_path / name, dodge, tests=tests) for name, dodge in DODGES.items()), return_exceptions=True
    )
    assert [(name, each[0] if isinstance(each, tuple) else each) for name, each in zip(DODGES, found, strict=True)] == [
        (name, 0.0) for name in DODGES
    ]
    broken = {name for name, each in zip(DODGES, found, strict=True) if isinstance(each, tuple) and "broken" in each[1]}
    assert broken == {"killer", "replaced"}


async def test_settings_of_pytest_above_the_tests_are_not_the_agents(tmp_path: Path):
    tests = "#!/bin/bash\nls /conftest.py && r=1 || r=0; echo $r > /logs/verifier/reward.txt\n"
    plant = "touch /pytest.ini /conftest.py"
    assert (await rewarded(tmp_path / "agent", plant, tests=tests))[0] == 0.0
    kept = f"FROM ubuntu:24.04\nRUN {plant}\nWORKDIR /app\n"
    assert (await rewarded(tmp_path / "task", tests=tests, dockerfile=kept))[0] == 1.0


async def test_work_is_judged_after_its_last_command_was_ended_and_twice(tmp_path: Path):
    write_task(tmp_path / "hello")
    environment = HarborEnvironment(HarborOptions(tasks=str(tmp_path)))
    await environment.reset(TASK)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await environment.step(said("sleep 60"))
    evidence = await environment.evidence()
    assert (evidence["return"], evidence["done"]) == (0, False)
    assert await environment._test() == await environment._test() == 0.0
    await environment.close()


async def test_a_build_cannot_reach_the_host(tmp_path: Path):
    victim = tmp_path / "victim.txt"
    victim.write_text("of the host\n")
    linked = f"FROM ubuntu:24.04\nRUN mkdir -p /app{tmp_path} && ln -s {victim} /app/words.txt\nCOPY words.txt /app/\n"
    relative = "../" * 3 + "victim.txt"
    for name, dockerfile in {
        "linked": f"{linked}WORKDIR /app\n",
        "above": f"FROM ubuntu:24.04\nCOPY {relative} /app/\n",
        "link": "FROM ubuntu:24.04\nCOPY link.txt /app/\n",
        "workdir": f"FROM ubuntu:24.04\nRUN ln -s {tmp_path} /up\nWORKDIR /up/made\n",
    }.items():
        folder = write_task(tmp_path / name / "hello", dockerfile=dockerfile)
        (folder / "environment" / "link.txt").symlink_to(victim)
        environment = HarborEnvironment(HarborOptions(tasks=str(tmp_path / name)))
        try:
            await environment.reset(TASK)
            shown = await environment.step(said("cat /app/* 2>&1"))
            assert name in ("linked", "workdir") and "of the host" not in (shown.messages[-1].content or "")
        except BadEnvironmentError as error:
            expected = {"above": "there is no such file in environment/", "link": "leads out of environment/"}
            assert expected.get(name, "failed: ") in str(error)
        finally:
            await environment.close()
    assert victim.read_text() == "of the host\n" and not (tmp_path / "made").exists()


async def test_links_inside_a_copied_folder_stay_links(tmp_path: Path):
    folder = write_task(tmp_path / "hello", dockerfile=f"{DOCKERFILE}COPY --chmod=750 . /app/all\n")
    (folder / "environment" / "link.txt").symlink_to("words.txt")
    environment = HarborEnvironment(HarborOptions(tasks=str(tmp_path)))
    await environment.reset(TASK)
    shown = await environment.step(said("readlink all/link.txt; stat -c %a all/words.txt; cat all/link.txt"))
    assert shown.messages[-1].content == "words.txt\n750\none\ntwo"
    await environment.close()


async def test_a_task_sees_no_variable_of_the_user_that_is_not_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_KEY", "sk-1")
    config = '[environment.env]\nKEY = "${SECRET_KEY}"\nOTHER = "${SECRET_KEY:-none}"\n'
    write_task(tmp_path / "hello", config=config)
    refused = HarborEnvironment(HarborOptions(tasks=str(tmp_path)))
    with pytest.raises(BadEnvironmentError, match=r'SECRET_KEY, .*: allow it with pass_env = \["SECRET_KEY"\]'):
        await refused.reset(TASK)
    await refused.close()
    check = check_folders(find_tasks(tmp_path))[0]
    assert check.oracle is None and "--pass-env SECRET_KEY" in check.problems[0]
    allowed = HarborEnvironment(HarborOptions(tasks=str(tmp_path), pass_env=("SECRET_KEY",)))
    await allowed.reset(TASK)
    assert (await allowed.step(said("echo $KEY $OTHER"))).messages[-1].content == "sk-1 sk-1"
    await allowed.close()
    (tmp_path / "hello" / "task.toml").write_text('[environment.env]\nOTHER = "${SECRET_KEY:-none}"\n')
    assert HarborContainer(read_task(tmp_path / "hello"), tmp_path).resolved({"A": "${SECRET_KEY:-none}"}) == {
        "A": "none"
    }


def test_two_tasks_of_one_name_are_told_apart_by_their_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("one", "two"):
        write_task(tmp_path / name / "hello")
    with pytest.raises(BadEnvironmentError, match="several tasks 'hello': name one of one/hello, two/hello"):
        find_task(tmp_path, "hello")
    assert find_task(tmp_path, "two/hello") == tmp_path / "two" / "hello"
    assert find_task(tmp_path / "one", "hello") == find_task(tmp_path / "one" / "hello", "hello")
    rows = tmp_path / "rows.jsonl"
    assert main(["tasks", "check", str(tmp_path), "--rows", str(rows)]) == 0
    assert rows.read_text() == '{"task": "one/hello"}\n{"task": "two/hello"}\n'
    main(["tasks", "list", str(tmp_path)])
    assert "two/hello  runs here" in capsys.readouterr().out
