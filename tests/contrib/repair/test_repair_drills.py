"""What a policy is fine-tuned on before it repairs: the oracle's right answers, and drills in their form."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Sequence

import pytest

from openhands_rl_plugin.config.host import TOOLS
from openhands_rl_plugin.contrib.repair.demonstrations import lessons
from openhands_rl_plugin.contrib.repair.oracle import oracle_plan
from openhands_rl_plugin.contrib.repair.rows import repair_instances, spec_of
from openhands_rl_plugin.core.types import Message, Node, Task, Trajectory
from openhands_rl_plugin.evals.swe.instances import Instance
from openhands_rl_plugin.testing import sample_episode

V0 = TOOLS["v0"]
EDIT = re.compile(r"python3 run_tests.py --edit (\S+) <<'E'\n((\d+).*)\nE\n</parameter>")


def rolled_out(instance: Instance, seed: int = 0) -> Trajectory:
    """The oracle's episode, with answers of the tools that have the file in them."""
    spec = spec_of(instance)
    nodes = [
        Node(parent=None, message=Message(role="system", content="tools")),
        Node(parent=0, message=Message(role="user", content=f"{instance.problem_statement} It is /workspace/repo.")),
    ]
    for call in oracle_plan(instance, V0, seed):
        nodes.append(Node(parent=len(nodes) - 1, message=Message(role="assistant", content=call.text), sampled=True))
        shown = "done"
        if call.errs:
            line = spec.files[spec.path].split("\n")[spec.line - 1].strip()
            shown = f"RESULT:\n2 failed, 3 passed\nUndone. Line {spec.line} of {spec.path}:\n{line}\n[exit code 1]"
        nodes.append(Node(parent=len(nodes) - 1, message=Message(role="user", content=shown)))
    task = Task(id=instance.instance_id, environment="swe", data={})
    return sample_episode("e").model_copy(update={"nodes": tuple(nodes), "head": len(nodes) - 1, "task": task})


@pytest.fixture(scope="module")
def instances() -> tuple[Instance, ...]:
    return repair_instances(1, "train")[:12]


def test_errors_are_context_and_what_follows_is_learnt(instances: tuple[Instance, ...]) -> None:
    found = lessons([*map(rolled_out, instances)], instances, tools=V0, seed=0, drills=0)
    assert len(found) == len(instances)
    left = 0
    for lesson, instance in zip(found, instances, strict=True):
        plan = oracle_plan(instance, V0, 0)
        assert [node.message.content for node in lesson.nodes if node.sampled] == [
            call.text for call in plan if not call.errs
        ]
        left += sum(call.errs for call in plan)
    assert left > 0


def test_a_drill_is_one_edit_that_undoes_one_bug(instances: tuple[Instance, ...]) -> None:
    episodes = [rolled_out(each, 3) for each in instances]
    found = lessons(episodes, instances, tools=V0, seed=3, drills=30)[12:]
    assert len({each.id for each in found}) == 30
    paths: Counter[str] = Counter()
    retries: Counter[int] = Counter()
    ended = 0
    for drill in found:
        learnt = [at for at, node in enumerate(drill.nodes) if node.sampled]
        _, task, *seen, edit = (str(node.message.content) for node in drill.nodes[: learnt[0] + 1])
        [[file, script, line]] = re.findall(EDIT, edit)
        # After it the tests pass and the episode ends, or there is nothing.
        end = drill.nodes[learnt[0] + 1 :]
        assert [node.sampled for node in end] in ([], [False, True])
        assert not end or "<function=finish>" in str(end[-1].message.content)
        ended += bool(end)
        assert file in task and not any(spec_of(each).path in task for each in instances)
        paths[file] += 1
        # The line is given: nothing else is needed. What was tried before is not what is tried now.
        [reads] = re.findall(rf"The bug is in line {line} of {re.escape(file)}(?:, in def .*\):|:)\n(.*)\n", task)
        again = f"RESULT:\n2 failed, 3 passed\nUndone. Line {line} of {file}:\n{reads}\n[exit code 1]"
        assert all(text == again for text in seen[1::2])
        tried = [found for text in seen[::2] for _, found, _ in re.findall(EDIT, text)]
        assert 2 * len(set(tried)) == len(seen) and script not in tried
        retries[len(tried)] += 1
    assert len(paths) > 3 and 0 < ended < 30 and len(retries) > 1


def test_drills_show_no_function_that_is_held_out() -> None:
    instances = repair_instances(1, "train")[:2]
    shown = functions_of(lessons([*map(rolled_out, instances)], instances, tools=V0, seed=0, drills=8)[2:])
    # A test has the name of its function without underscores.
    strange = frozenset(form.format(name) for name in sorted(shown)[::2] for form in ("{}", "_{}", "__{}__"))
    others = functions_of(
        lessons([*map(rolled_out, instances)], instances, tools=V0, seed=0, drills=8, strange=strange)[2:]
    )
    assert min(len(others), len(shown)) > 3 and not others & strange


def test_a_short_drill_is_a_line_and_the_script_that_mends_it(instances: tuple[Instance, ...]) -> None:
    episodes = [rolled_out(each, 3) for each in instances[:2]]
    found = lessons(episodes, instances[:2], tools=V0, seed=3, drills=6, short_drills=20)
    short, edits = found[8:], set[tuple[str, str]]()
    assert len(short) == len({each.id for each in short}) == 20
    for drill in short:
        _, task, answer = (str(node.message.content) for node in drill.nodes)
        assert [node.sampled for node in drill.nodes] == [False, False, True]
        [[number, head, line]] = re.findall(r"The bug is in line (\d+)(?:, in (def .*\):)|:)\n(.*)\n", task)
        [[script, place]] = re.findall(r"<<'E'\n((\d+)s.*)\nE", answer)
        assert place == number and (head or line.startswith("def "))
        mended = subprocess.run(["sed", script[len(place) :]], input=line, capture_output=True, text=True, check=True)
        assert mended.stdout != line
        edits.add((line, answer))
    full = ["\n".join(str(node.message.content) for node in each.nodes) for each in found[2:8]]
    assert len(edits) > 15 and not any(line in text and answer in text for text in full for line, answer in edits)


def functions_of(drills: Sequence[Trajectory]) -> set[str]:
    """The names in their statements: a test has the name of its function."""
    return {re.findall(r" in test_(\w+)\.py fails", str(each.nodes[1].message.content))[0] for each in drills}
