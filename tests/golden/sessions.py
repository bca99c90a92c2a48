"""Recorded sessions with a scripted model server: what was asked of the model, and the trajectory, node by node.

Needs OpenHands V0 or V1, and bubblewrap.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_model import EMPTY, Policy, ScriptedModel, call, refusal, reply, serve, stopped

from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.core.messages import to_message, to_wire
from openhands_rl_plugin.core.types import EpisodeRequest, Limits, Task, Trajectory
from openhands_rl_plugin.hosts.pool import open_runner
from openhands_rl_plugin.hosts.shared.sessions import HostOptions

BASH, EDIT = "execute_bash", "str_replace_editor"
V1_TOOLS = {BASH: "terminal", EDIT: "file_editor"}
FULL = refusal(400, "This model's maximum context length is 100 tokens. However, your messages resulted in 200 tokens.")
METADATA = ("kind", "history_rewritten", "replayed_as", "missing")
_RANDOM = re.compile(r"127\.0\.0\.1:\d+|/tmp/[\w./-]+|\b20\d\d-\d\d-\d\d\b|\b[0-9a-f]{8}-[0-9a-f-]{27}\b|chatcmpl-\d+")

Answer = dict[str, Any]


def bash(command: str, id: str = "c", **more: Any) -> Answer:
    return reply(None, call(BASH, {"command": command, "security_risk": "LOW", **more}, id))


def finish(id: str = "f") -> Answer:
    return reply(None, call("finish", {"message": "done"}, id))


def scripted(*answers: Answer) -> Callable[[], Policy]:
    """A fresh policy that gives these answers in order, and then finishes."""

    def make() -> Policy:
        left = iter(answers)
        return lambda body: next(left, finish("extra"))

    return make


def condensing() -> Policy:
    numbers = iter(range(1000))

    def policy(body: dict[str, Any]) -> Answer:
        number = next(numbers)
        if not body.get("tools"):
            return reply(f"summary {number}")
        return reply(f"turn {number}", call("think", {"thought": f"hm {number}"}, f"call-{number}"))

    return policy


def refusing_token_ids() -> Policy:
    refused = refusal(400, "Unknown field return_token_ids")
    return lambda body: (
        refused if "return_token_ids" in body else bash("echo 1", "a") if len(body["messages"]) < 4 else finish()
    )


def writing() -> Policy:
    """Looks, then writes the right line or a wrong one, then finishes; which one is the seed's."""

    def policy(body: dict[str, Any]) -> Answer:
        turn, way = sum(message["role"] == "assistant" for message in body["messages"]), body["seed"] % 3
        if turn == 0:
            return bash("cat answer.txt; echo note >> notes; wc -l < notes", f"look{way % 2}")
        return (
            bash(f"echo {'wrong' * way or 'right'} > answer.txt", f"write{way}") if turn == 1 else finish(f"end{way}")
        )

    return policy


FUNCTION = "<function=execute_bash>\n<parameter=command>{}</parameter>\n<parameter=security_risk>LOW</parameter>\n"
TEXT = (
    stopped("Looking.\n" + FUNCTION.format("echo one")),
    reply("<function=no_such_tool>\n<parameter=x>1</parameter>\n"),
    reply("\n\n" + FUNCTION.format("\necho two\n") + "</function>"),
    reply("  It is done, I think. \n"),
    stopped("<function=finish>\n<parameter=message>Done.</parameter>\n"),
)
MANY = tuple(bash(f"echo {n}", f"c{n}") for n in range(9))
CONDENSER = {"condenser": {"type": "llm", "max_size": 10, "keep_first": 3}}
TESTS = "test ! -e answer.txt || grep -qx right answer.txt"
BY_TESTS = {"value": "reward", "value_options": {"reward": "command", "reward_options": {"command": TESTS}}}
CREATE = {"command": "create", "path": "/workspace/b.txt", "file_text": "x\n", "security_risk": "LOW"}

SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {
        "make": scripted(
            bash("echo hi > a.txt", "a"), bash("cat a.txt; pwd", "b"), reply(None, call(EDIT, CREATE, "c")), finish()
        )
    },
    "several calls in one answer": {
        "make": scripted(
            reply(
                "I look.",
                *bash("echo 1", "a")["tool_calls"],
                call("think", {"thought": "hm"}, "b"),
                *bash("echo 2", "c")["tool_calls"],
            ),
            finish(),
        )
    },
    "malformed, empty, unknown tool": {
        "make": scripted(
            bash("echo 1", "a"),
            reply(None, call(BASH, '{"command": "broken', "b")),
            reply(None, call("nope", {"a": 1}, "c")),
            reply(None, call(BASH, {"command": 7}, "d")),
            EMPTY,
            bash("echo 2", "e"),
            finish(),
        )
    },
    "text without a call": {"make": scripted(reply("Let me think."), bash("echo 2", "e"), reply(""), finish())},
    "text tool calls": {"make": scripted(*TEXT), "options": {"native_tool_calling": False}},
    "condenser": {"make": condensing, "options": CONDENSER, "limits": {"max_turns": 12}},
    "limit of turns": {"make": scripted(*MANY), "limits": {"max_turns": 3}},
    "limit of the prompt": {
        "make": scripted(*(bash("seq 1 400", f"c{n}") for n in range(9))),
        "limits": {"max_turns": 9, "max_prompt_length": 14000},
    },
    "context window full": {"make": scripted(*MANY[:2], *[FULL] * 20)},
    "first prompt too long": {"make": scripted(*[FULL] * 20)},
    "errors at the first call": {"make": scripted(refusal(500, "boom"), bash("echo 1", "a"), finish())},
    "refuses token ids": {"make": refusing_token_ids},
    "same call id twice": {
        "make": scripted(bash("echo 1", "x"), bash("echo 2", "x"), bash("echo 1", "x"), finish()),
    },
    "no token ids asked": {"make": scripted(bash("echo 1", "a"), finish()), "options": {"token_ids": False}},
    "long and slow": {
        "make": scripted(bash("seq 1 9000", "a"), bash("sleep 30", "b", timeout=1), bash("exit 3", "c"), finish())
    },
    "server error, then fine": {
        "make": scripted(bash("echo 1", "a"), refusal(500, "boom"), refusal(429, "busy"), bash("echo 2", "b"), finish())
    },
    "server refuses": {"make": scripted(bash("echo 1", "a"), refusal(403, "no"))},
    "server gone for good": {"make": scripted(bash("echo 1", "a"), *[refusal(503, "down")] * 40)},
}
SEARCHES = {
    "BestOfN": {"n": 4, "seed": 1},
    "ToT": {"num_branches": 2, "depth": 2, "seed": 2},
    "MCTS": {"num_simulations": 6, "first_branches": 2, "num_branches": 3, "depth": 4, "seed": 3},
}
SCENARIOS |= {
    name: {"make": writing, "settings": {"rollout_strategy": name, "strategy": options | BY_TESTS}}
    for name, options in SEARCHES.items()
}


def normal(value: Any) -> Any:
    """Without what is another one in each run: ports, temporary files, ids and the date."""
    return json.loads(_RANDOM.sub("RANDOM", json.dumps(value)))


def renamed(answer: Answer, names: dict[str, str]) -> Answer:
    if answer.get("tool_calls"):
        calls = [each | {"function": dict(each["function"])} for each in answer["tool_calls"]]
        for each in calls:
            each["function"]["name"] = names.get(each["function"]["name"], each["function"]["name"])
        return answer | {"tool_calls": calls}
    return answer


def view(trajectory: Trajectory) -> Any:
    """What is recorded, but for times and the recorder's notes on the response; the server's token ids as text."""
    made = trajectory.model_dump(mode="json", exclude={"times", "schema_version"})
    for node in made["nodes"]:
        node["metadata"] = {name: node["metadata"][name] for name in METADATA if name in node["metadata"]}
        for name in ("prompt_ids", "sampled_ids") if node["tokens"] else ():
            node["tokens"][name] = "".join(map(chr, node["tokens"][name]))
    return made | {"acted": trajectory.acted()}


def plain(body: dict[str, Any]) -> dict[str, Any]:
    """What a request of V1 asks, whatever its form: the SDK sends texts as parts, and a key for the prompt's cache."""
    messages = [to_wire(to_message(message)) for message in body["messages"]]
    rest = {name: value for name, value in body.items() if name not in ("model", "messages", "prompt_cache_key")}
    if "max_completion_tokens" in rest:
        rest["max_tokens"] = rest.pop("max_completion_tokens")
    return {"model": body["model"], "messages": messages, **rest}


def in_order(session: Any) -> Any:
    """Of a search, which asks and executes side by side: requests sorted, and nodes from the root, siblings sorted."""
    found, nodes = session["trajectory"], session["trajectory"]["nodes"]
    texts = [json.dumps(node | {"parent": None}) for node in nodes]
    order: list[int] = []

    def visit(parent: int | None) -> None:
        below = [at for at, node in enumerate(nodes) if node["parent"] == parent]
        for at in sorted(below, key=lambda at: texts[at]):
            order.append(at)
            visit(at)

    visit(None)
    places = {at: place for place, at in enumerate(order)}
    moved = {"head": places[found["head"]], "acted": [places[at] for at in found["acted"]]}
    moved["nodes"] = [nodes[at] | {"parent": places.get(nodes[at]["parent"])} for at in order]
    return {"trajectory": found | moved, "requests": sorted(session["requests"], key=json.dumps)}


async def recorded_session(server: ScriptedModel, model: str, scenario: dict[str, Any], names: dict[str, str]) -> Any:
    policy = scenario["make"]()
    server.policies[model] = lambda body: renamed(policy(body), names)
    serving = ServingSettings(base_url=server.url, model=model, request_timeout=20.0)
    settings = RLSettings(serving=serving, max_turns=10, max_obs_length=4096, **scenario.get("settings", {}))
    options = HostOptions(environment_mode=False, **scenario.get("options", {}))
    limits = Limits(**{"max_turns": 10, "max_obs_length": 4096, **scenario.get("limits", {})})
    task = Task(id="t", environment="workspace", instruction="Do it.", limits=limits)
    async with open_runner(settings, options) as runner:
        found = await runner.run(EpisodeRequest(task=task, run_id="r", group_id="g", seed=11))
    asked = [plain(body) for body in server.requests[model]] if names else server.requests[model]
    made = normal({"trajectory": view(found), "requests": asked})
    return in_order(made) if "settings" in scenario else made


async def play_all(names: dict[str, str]) -> Any:
    """``names``: how the host calls the tools. Some at a time, because half of the time they wait to try again."""
    turns = asyncio.Semaphore(6)

    async def in_turn(at: int, scenario: dict[str, Any]) -> Any:
        async with turns:
            return await recorded_session(server, f"policy{at}-v000003", scenario, names)

    with serve() as server:
        found = await asyncio.gather(*(in_turn(at, each) for at, each in enumerate(SCENARIOS.values())))
        return dict(zip(SCENARIOS, found, strict=True))


@contextmanager
def hidden_machine(host: str) -> Iterator[None]:
    """Show the model what it was shown when the golden file was made, because seeds depend on it: V0 has the date, V1
    the path of Python, which is another one in each checkout."""
    with pytest.MonkeyPatch.context() as patch:
        if host == "v0":
            from openhands.memory import memory

            patch.setattr(memory, "datetime", SimpleNamespace(now=lambda zone: datetime(2026, 11, 28, tzinfo=zone)))
        else:
            from openhands_rl_plugin.hosts.v1 import workspace

            made = workspace.CmdOutputMetadata
            patch.setattr(workspace, "CmdOutputMetadata", lambda **given: made(**given | {"py_interpreter_path": ""}))
        yield


def record_all(host: str) -> Any:
    with hidden_machine(host):
        return asyncio.run(play_all({} if host == "v0" else V1_TOOLS))
