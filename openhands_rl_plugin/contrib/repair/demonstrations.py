"""Demonstrations of repair tasks, and drills: edits of functions of Python's own library."""

from __future__ import annotations

import ast
import os
import random
import re
import sysconfig
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import islice, pairwise
from pathlib import Path

from openhands_rl_plugin.apps.loop.run import LoopJob, open_player
from openhands_rl_plugin.apps.loop.tasks import Demonstrator
from openhands_rl_plugin.config.host import TOOLS, ToolNames, host_of
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.contrib.repair.bugs import (
    LoneFunction,
    bugs_in,
    function_hint,
    is_told,
    line_edit,
    lone_function,
    sed_script,
)
from openhands_rl_plugin.contrib.repair.oracle import (
    END,
    MOST_ERRORS,
    ORACLE,
    RepairOracle,
    edit_call,
    oracle_plan,
    other_edits,
    serve_oracle,
)
from openhands_rl_plugin.contrib.repair.rows import spec_of, statement
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import EpisodeRunner, TrajectoryStorage
from openhands_rl_plugin.core.types import EpisodeRequest, Message, Node, Trajectory
from openhands_rl_plugin.evals.swe.instances import Instance
from openhands_rl_plugin.evals.tasks.bugs import parse
from openhands_rl_plugin.training.loop.loop import Lessons

_Bugs = tuple[LoneFunction, tuple[tuple[str, str], ...]]
"""A function, and of each bug the kind and the text with it."""
_LEFT_OUT = ("test/", "idlelib/", "lib2to3/", "turtledemo/", "ensurepip/", "site-packages/", "dist-packages/")
_MOST_OF_A_FUNCTION = 8
_MOST_OF_A_MODULE = 8
"""The functions of one module are alike."""


def library_bugs(source: random.Random, *, strange: frozenset[str]) -> Iterator[tuple[LoneFunction, str]]:
    """Functions, and of each a text with a bug: one of every function before any has a second, and every kind of bug
    about as often. Line and head are enough for each repair. None has a name in ``strange``.
    """
    known: list[_Bugs] = []
    kinds: Counter[str] = Counter()
    used: set[str] = set()
    for turn in range(_MOST_OF_A_FUNCTION):
        for function, found in known if turn else _functions(source, strange):
            if not turn:
                known.append((function, found))
            bugs: dict[str, list[str]] = {}
            for kind, text in found:
                if text not in used:
                    bugs.setdefault(kind, []).append(text)
            if not bugs:
                continue
            # Every function can lose its "return", few have an index: the kind that was least often is next.
            kind = min(sorted(bugs), key=kinds.__getitem__)
            kinds[kind] += 1
            wrong = source.choice(bugs[kind])
            used.add(wrong)
            yield function, wrong


def _functions(source: random.Random, strange: frozenset[str]) -> Iterator[_Bugs]:
    """Yield functions with all their bugs; finding those of one takes a tenth of a second."""
    for function in library_functions(source):
        if function.name not in strange:
            bugs = bugs_in(function.text, function.name)
            yield function, tuple(bug for bug in bugs if is_told(bug[1], function.text, function.name))


def library_functions(source: random.Random) -> Iterator[LoneFunction]:
    """Short functions and methods of this Python's standard library. Module by module in the order of ``source``: all
    of them take seconds to read."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (f"{folder}/{name}" for folder, _, names in os.walk(root) for name in names if name.endswith(".py"))
    paths = sorted(file.removeprefix(f"{root}/") for file in files)
    kept = [path for path in paths if not path.startswith(_LEFT_OUT) and "/test" not in path]
    source.shuffle(kept)
    for path in kept:
        try:
            text = (root / path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        try:
            tree = parse(text)
        except (SyntaxError, ValueError, RecursionError):
            continue
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        chosen = source.sample(nodes, min(_MOST_OF_A_MODULE, len(nodes)))
        yield from filter(None, (lone_function(path, node) for node in chosen))


_SYSTEM = "Repair the line."


def short_drill(episode: Trajectory, function: LoneFunction, wrong: str) -> Trajectory:
    """An episode of one answer, the script of ``sed`` that makes the function's text of ``wrong``. ``episode``: any
    demonstration, which says what is not of the conversation. Line and head of the function must be enough for the
    repair (``is_told``)."""
    edit = line_edit(wrong, function.text)
    line = wrong.split("\n")[edit.first - 1].strip()
    statement_text = f"The bug is in line {edit.first}{function_hint(wrong, function.name, line)}\n{line}\n"
    # As in a command of the other form.
    answer = f"<<'{END}'\n{sed_script(wrong, function.text)}\n{END}"
    nodes = (
        Node(parent=None, message=Message(role="system", content=_SYSTEM)),
        Node(parent=0, message=Message(role="user", content=statement_text)),
        Node(parent=1, message=Message(role="assistant", content=answer), sampled=True),
    )
    return episode.model_copy(update={"nodes": nodes, "head": 2})


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
    strange: frozenset[str] = frozenset(),
) -> list[Trajectory]:
    """The episodes for fine-tuning: correct responses of the oracle's episodes, ``drills`` and ``short_drills``.

    Drills have the same form; short drills show other bugs.

    ``tools``: those of the host. ``strange``: names of functions that no drill may show, those of the held-out tasks.
    There are fewer drills where the library has no more bugs.
    """
    by_id = {each.instance_id: each for each in instances}
    known = [(each, by_id[each.task.id]) for each in demonstrations]
    right = [_without_errors(each, instance, tools, seed) for each, instance in known]
    forms = [(each, instance) for each, (_, instance) in zip(right, known, strict=True)]
    source = random.Random(f"{seed} drills")
    bugs = library_bugs(source, strange=strange)
    made = [*islice(_drills(forms, bugs, tools, source), drills)]
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
    bugs: Iterator[tuple[LoneFunction, str]],
    tools: ToolNames,
    choice: random.Random,
) -> Iterator[Trajectory]:
    failures = [node for episode, _ in known for node in _after_errors(episode)]
    for made, (function, wrong) in enumerate(bugs):
        episode, instance = known[made % len(known)]
        yield _drill(episode, tools, instance, function, wrong, failures, choice)


def _drill(
    episode: Trajectory,
    tools: ToolNames,
    instance: Instance,
    function: LoneFunction,
    wrong: str,
    failures: Sequence[Node],
    choice: random.Random,
) -> Trajectory:
    """``failures``: what was seen after edits that did not help."""
    spec = spec_of(instance)
    edit = line_edit(wrong, function.text)
    place = {"path": function.path, "function": function.name, "line": edit.first, "files": {function.path: wrong}}
    test = f"test_{function.name.strip('_')}.py::test_1"
    changed = {
        instance.problem_statement: statement(spec.model_copy(update=place), 1, [test]),
        spec.path: function.path,
    }
    path = [episode.nodes[at] for at in episode.path()]
    asked = next((at for at, node in enumerate(path) if node.message.role == "assistant"), 0)
    others = other_edits(wrong, function.text, function.name)
    kept = path[:asked]
    choice.shuffle(others)
    for other in others[: MOST_ERRORS if failures else 0]:
        if choice.random() >= _TRIED:
            break
        # The tests only say how many failed, so that what was seen after one edit may stand after any.
        seen_then = _of_line(choice.choice(failures), function.path, edit.first, wrong)
        kept += [_saying(path[asked], edit_call(tools, function.path, wrong, other)), seen_then]
    answer = _saying(path[asked], edit_call(tools, function.path, wrong, function.text))
    end = next((at for at in reversed(range(len(path))) if path[at].sampled), 0)
    kept += [
        answer.model_copy(update={"sampled": True}),
        *(path[end - 1 : end + 1] if choice.random() < _ENDED else []),
    ]
    nodes = [_like(node, changed, at) for at, node in enumerate(kept)]
    return episode.model_copy(update={"nodes": tuple(nodes), "head": len(nodes) - 1})


def _after_errors(episode: Trajectory) -> Iterator[Node]:
    """Yield the observations after edits that are not trained on."""
    path = [episode.nodes[at] for at in episode.path()]
    for node, seen in pairwise(path):
        if node.message.role == "assistant" and not node.sampled:
            yield seen


def _of_line(node: Node, path: str, number: int, text: str) -> Node:
    """The observation after an edit, with this line in place of its own task's."""
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


DRILLS, SHORT_DRILLS = 4, 50
"""How many for each demonstration; docs/background/how-it-learns.md has the reasons."""


class RepairDemonstrator(Demonstrator):
    """The oracle of repair tasks, in the same host as the policy."""

    @asynccontextmanager
    async def open(self, job: LoopJob, storage: TrajectoryStorage) -> AsyncIterator[EpisodeRunner]:
        """As in ``Demonstrator``. Raises ``ConfigError`` for tool calls by the API."""
        if job.native_tool_calling:
            raise ConfigError("demonstrations of repair tasks have their calls in the text: --no-native-tool-calling")
        instances = [entry.instance for entry in job.tasks.demonstrations if entry.instance is not None]
        with serve_oracle(RepairOracle(instances, TOOLS[host_of(job.settings)], job.settings.sampling.seed)) as url:
            own = {"base_url": url, "base_urls": (), "model": ORACLE, "api_key_env": "", "server": "auto"}
            settings = job.settings.model_copy(
                update={
                    "serving": job.settings.serving.model_copy(update=own),
                    "rollout_strategy": RLSettings().rollout_strategy,
                    "strategy": {},
                }
            )
            async with open_player(job, settings, storage) as runner:
                yield _Oracle(runner)

    def lessons(self, job: LoopJob) -> Lessons:
        """Make the training episodes: correct responses of the oracle's episodes, and drills."""
        known = [entry.instance for entry in job.tasks.demonstrations if entry.instance is not None]
        held_out = [entry.instance for entry in job.tasks.held_out if entry.instance is not None]
        strange = frozenset(spec_of(instance).function for instance in held_out)
        count = job.settings.loop.demonstrations

        def made(demonstrations: Sequence[Trajectory]) -> Sequence[Trajectory]:
            return lessons(
                demonstrations,
                known,
                tools=TOOLS[host_of(job.settings)],
                seed=job.settings.sampling.seed,
                drills=count * DRILLS,
                short_drills=count * SHORT_DRILLS,
                strange=strange,
            )

        return made


class _Oracle:
    """An ``EpisodeRunner`` whose episodes are no policy's."""

    def __init__(self, runner: EpisodeRunner) -> None:
        self._runner = runner

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """Run one episode with the oracle in the place of the policy."""
        return await self._runner.run(request.model_copy(update={"served_model": None}))


REPAIR = RepairDemonstrator()
