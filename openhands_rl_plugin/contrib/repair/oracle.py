"""The scripted oracle of tasks at level 1: what it does in each turn, and its server."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from openhands_rl_plugin.config.host import ToolNames
from openhands_rl_plugin.contrib.repair.bugs import bugs_in, line_edit, sed_script
from openhands_rl_plugin.contrib.repair.rows import RUN_TESTS, spec_of
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.messages import text_of
from openhands_rl_plugin.core.servers import listening, serving
from openhands_rl_plugin.evals.swe.instances import Instance

ORACLE = "repair-oracle"
WRONG_FIX = 0.6
"""Share of edits that do not repair, where there are others to make."""
MOST_ERRORS = 2
END = "E"
"""The last line of an edit's script."""
_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")


class OracleCall(NamedTuple):
    """An answer. ``errs``: an edit that does not repair, which is there for what follows it."""

    text: str
    errs: bool = False


class RepairOracle:
    """Answers for the tasks of ``instances``, found by their statements. ``tools``: those of its host."""

    def __init__(self, instances: Sequence[Instance], tools: ToolNames, seed: int = 0) -> None:
        self._tools = tools
        self._seed = seed
        self._instances = {each.problem_statement: each for each in instances}

    def answer(self, conversation: Sequence[Mapping[str, str]]) -> str:
        """The next answer of a conversation, messages with ``role`` and ``content``. Raises ``ConfigError``."""
        asked = next((each["content"] for each in conversation if each["role"] == "user"), "")
        instance = next((each for text, each in self._instances.items() if text in asked), None)
        if instance is None:
            raise ConfigError("the oracle does not know the task of this conversation")
        plan = oracle_plan(instance, self._tools, self._seed)
        return plan[min(sum(each["role"] == "assistant" for each in conversation), len(plan) - 1)].text


def oracle_plan(instance: Instance, tools: ToolNames, seed: int) -> list[OracleCall]:
    """The responses of an episode, in their order, and which of them err."""
    spec = spec_of(instance)
    choice = random.Random(f"{seed} {instance.instance_id}")
    wrong, right = spec.files[spec.path], fixed_text(instance)
    plan: list[OracleCall] = []
    others = other_edits(wrong, right, spec.function)
    choice.shuffle(others)
    for other in others[:MOST_ERRORS]:
        if choice.random() >= WRONG_FIX:
            break
        plan.append(OracleCall(edit_call(tools, spec.path, wrong, other), errs=True))
    return [
        *plan,
        OracleCall(edit_call(tools, spec.path, wrong, right)),
        OracleCall(_call("finish", message="The tests pass.")),
    ]


def fixed_text(instance: Instance) -> str:
    """The module without the bug: the row's patch, applied. Raises ``ConfigError`` for a patch of another text."""
    spec = spec_of(instance)
    old = spec.files[spec.path].splitlines(keepends=True)
    new: list[str] = []
    at = 0
    for line in instance.patch.splitlines(keepends=True)[3:]:
        if found := _HUNK.match(line):
            start = int(found[1]) - 1
            new += old[at:start]
            at = start
        elif line[0] == "+":
            new.append(line[1:])
        elif old[at : at + 1] != [line[1:]]:
            raise ConfigError(f"{instance.instance_id}: its patch is not for its files")
        else:
            new += old[at : at + 1] if line[0] == " " else []
            at += 1
    return "".join([*new, *old[at:]])


def other_edits(wrong: str, right: str, function: str) -> list[str]:
    """Texts that differ from ``wrong`` in one place of the lines in which ``right`` does, and are not ``right``."""
    place = line_edit(wrong, right)
    found: dict[str, None] = {}
    for _, text in bugs_in(wrong, function):
        edit = line_edit(wrong, text)
        if place.first <= edit.first and edit.last <= place.last and text.rstrip("\n") != right.rstrip("\n"):
            found[text] = None
    return list(found)


def edit_call(tools: ToolNames, path: str, old: str, new: str) -> str:
    """The edit that makes the text ``new`` of the text ``old`` of a file of the repository, with the tests after it,
    which is undone where they fail: the next one begins from the text that is known."""
    # The script has a here-document of its own: nothing in it needs quotes for the shell. What failed is undone and
    # the line shown again: a small model loses what it read before its own words.
    command = f"python3 {RUN_TESTS} --edit {path} <<'{END}'\n{sed_script(old, new)}\n{END}"
    # OpenHands writes a value of several lines on lines of its own.
    return _call(tools.shell, command=f"\n{command}\n", security_risk="MEDIUM")


def _call(name: str, **arguments: str) -> str:
    lines = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in arguments.items())
    return f"<function={name}>\n{lines}</function>"


@contextmanager
def serve_oracle(oracle: RepairOracle) -> Iterator[str]:
    """The URL of the server, which ends with the block."""

    async def models(_: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": ORACLE, "object": "model"}]})

    async def chat(request: Request) -> JSONResponse:
        try:
            body = await request.json()
            asked = [{"role": each["role"], "content": text_of(each["content"]) or ""} for each in body["messages"]]
            message = {"role": "assistant", "content": oracle.answer(asked)}
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            return JSONResponse({"error": {"message": str(error)}}, 400)
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        answer = {"id": "oracle", "object": "chat.completion", "created": 0, "model": ORACLE}
        return JSONResponse({**answer, "choices": [choice], "usage": usage})

    routes = [Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])]
    with listening("127.0.0.1", 0) as listener, serving(Starlette(routes=routes), listener) as url:
        yield f"{url}/v1"
