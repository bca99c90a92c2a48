"""Drills: one edit of a function of Python's standard library with a bug, in the form of a demonstration.

A demonstration teaches how to work, at the price of a whole episode; which edit repairs which bug takes many more
examples than there are tasks. A drill has what is told and the edit only, which is imitated. Before it stands the look
at the file where the line is not told, or now and then an edit that does not help, and after it now and then the end of
an episode; nothing is run.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise

from openhands_rl_plugin.config.host import ToolNames
from openhands_rl_plugin.contrib.repair.edits import line_edit
from openhands_rl_plugin.contrib.repair.library_bugs import library_bugs
from openhands_rl_plugin.contrib.repair.oracle import MOST_ERRORS, edit_call, oracle_plan, other_edits
from openhands_rl_plugin.contrib.repair.rows import Level, spec_of, statement
from openhands_rl_plugin.contrib.repair.short_drills import short_drill
from openhands_rl_plugin.contrib.repair.slices import SlicedFunction
from openhands_rl_plugin.core.types import Node, Trajectory
from openhands_rl_plugin.evals.swe.types import Instance

_SHOWN = re.compile(r"Undone\. Line \d+ of \S+:\n[^\n]*")
_TRIED = 0.5
"""Share of drills with an edit before that does not help, of these that with one more, and so on. Were there always
one, it would be learnt from the number of edits when to end an episode, and not from what the tests say."""
_ENDED = 0.3
"""Share of drills that go on to the end of the episode: what follows tests that pass is not what follows others."""


def lessons(
    demonstrations: Sequence[Trajectory],
    instances: Sequence[Instance],
    *,
    tools: ToolNames,
    seed: int,
    drills: int,
    short_drills: int = 0,
    level: Level,
    strange: frozenset[str] = frozenset(),
) -> list[Trajectory]:
    """What a policy is fine-tuned on: the right answers of the oracle's episodes, ``drills`` in their form, and
    ``short_drills``, which show other bugs.

    ``tools``: those of the host. ``strange``: names of functions that no drill may show, those of the held-out tasks.
    There are fewer drills where the library has no more bugs.
    """
    by_id = {each.instance_id: each for each in instances}
    known = [(each, by_id[each.task.id]) for each in demonstrations]
    right = [_without_errors(each, instance, tools, seed) for each, instance in known]
    forms = [(each, instance) for each, (_, instance) in zip(right, known, strict=True)]
    source = random.Random(f"{seed} drills")
    bugs = library_bugs(source, strange=strange, alone=level > 1)
    made = [*islice(_drills(forms, bugs, tools, level, source), drills)]
    if level > 1:
        bugs = library_bugs(random.Random(f"{seed} short drills"), strange=strange, alone=False)
    made += (short_drill(right[0], function, wrong) for function, wrong in islice(bugs, short_drills))
    return [*right, *(each.model_copy(update={"id": f"drill-{seed}-{at}"}) for at, each in enumerate(made))]


def _without_errors(episode: Trajectory, instance: Instance, tools: ToolNames, seed: int) -> Trajectory:
    """The episode with its errors as context, not as something to imitate."""
    plan = oracle_plan(instance, tools, seed)
    answers = [at for at in episode.path() if episode.nodes[at].sampled]
    wrong = {at for at, call in zip(answers, plan, strict=True) if call.errs}
    nodes = [
        node.model_copy(update={"sampled": False}) if at in wrong else node for at, node in enumerate(episode.nodes)
    ]
    return episode.model_copy(update={"nodes": tuple(nodes)})


def _drills(
    known: Sequence[tuple[Trajectory, Instance]],
    bugs: Iterator[tuple[SlicedFunction, str]],
    tools: ToolNames,
    level: Level,
    choice: random.Random,
) -> Iterator[Trajectory]:
    failures = [node for episode, _ in known for node in _after_errors(episode)]
    made = 0
    for function, wrong in bugs:
        episode, instance = known[made % len(known)]
        drill = _drill(episode, tools, instance, function, wrong, level, failures, choice)
        if drill is not None:
            made += 1
            yield drill


def _drill(
    episode: Trajectory,
    tools: ToolNames,
    instance: Instance,
    function: SlicedFunction,
    wrong: str,
    level: Level,
    failures: Sequence[Node],
    choice: random.Random,
) -> Trajectory | None:
    """``failures``: what was seen after edits that did not help. ``None`` where the line that is told is not enough, or
    the episode does not show the file as ``cat -n`` does."""
    spec = spec_of(instance)
    # Without the failing test that level 3 names there is nothing to be found: the function is told.
    edit = line_edit(wrong, function.text)
    place = {"path": function.path, "function": function.name, "line": edit.first, "files": {function.path: wrong}}
    told = spec.model_copy(update=place)
    test = f"test_{function.name.strip('_')}.py::test_1"
    changed = {
        instance.problem_statement: statement(told, 2 if level == 3 else level, [test]),
        _numbered(spec.files[spec.path]): _numbered(wrong),
        spec.path: function.path,
    }
    path = [episode.nodes[at] for at in episode.path()]
    asked = next((at for at, node in enumerate(path) if node.message.role == "assistant"), 0)
    others = other_edits(wrong, function.text, function.name)
    kept = path[:asked]
    if level == 1:
        choice.shuffle(others)
        for other in others[: MOST_ERRORS if failures else 0]:
            if choice.random() >= _TRIED:
                break
            # The tests only say how many failed, so that what was seen after one edit may stand after any.
            seen_then = _of_line(choice.choice(failures), function.path, edit.first, wrong)
            kept += [_saying(path[asked], edit_call(tools, function.path, wrong, other)), seen_then]
    else:
        shown = _numbered(spec.files[spec.path])
        seen = next((at for at in range(asked + 1, len(path)) if shown in str(path[at].message.content)), 0)
        if not seen or not path[seen - 1].sampled:
            return None
        # To look at the file before the tests were run is not to be imitated.
        kept += [path[seen - 1].model_copy(update={"sampled": False}), path[seen]]
    answer = _saying(path[asked], edit_call(tools, function.path, wrong, function.text))
    end = next((at for at in reversed(range(len(path))) if path[at].sampled), 0)
    kept += [
        answer.model_copy(update={"sampled": True}),
        *(path[end - 1 : end + 1] if choice.random() < _ENDED else []),
    ]
    nodes = [_like(node, changed, at) for at, node in enumerate(kept)]
    return episode.model_copy(update={"nodes": tuple(nodes), "head": len(nodes) - 1})


def _after_errors(episode: Trajectory) -> Iterator[Node]:
    """What was seen after the edits that are not to be imitated."""
    path = [episode.nodes[at] for at in episode.path()]
    for node, seen in pairwise(path):
        if node.message.role == "assistant" and not node.sampled:
            yield seen


def _of_line(node: Node, path: str, number: int, text: str) -> Node:
    """What was seen after an edit, with this line where it shows that of its own task."""
    line = text.split("\n")[number - 1].strip()
    content = _SHOWN.sub(
        lambda _: f"Undone. Line {number} of {path}:\n{line}", str(node.message.content or ""), count=1
    )
    return node.model_copy(update={"message": node.message.model_copy(update={"content": content})})


def _saying(node: Node, text: str) -> Node:
    """The same answer in other words, which are context."""
    return node.model_copy(update={"message": node.message.model_copy(update={"content": text}), "sampled": False})


def _like(node: Node, changed: Mapping[str, str], at: int) -> Node:
    text = str(node.message.content or "")
    for old, new in changed.items():
        text = text.replace(old, new)
    message = node.message.model_copy(update={"content": text})
    return node.model_copy(update={"parent": at - 1 if at else None, "message": message})


def _numbered(text: str) -> str:
    """As ``cat -n`` shows it in OpenHands' editors."""
    return "\n".join(f"{at:6}\t{line}" for at, line in enumerate(text.split("\n"), start=1))
