"""The same small repair under both prompts of ``[rl.workspace]``, on whichever OpenHands is installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from scripted_model import ScriptedModel, call, reply, stopped
from tokenizers import Tokenizer

from openhands_rl_plugin.apps.demo_model import default_model_directory
from openhands_rl_plugin.config.rl import PromptName, RLSettings, ServingSettings, WorkspaceSettings
from openhands_rl_plugin.core.messages import text_of
from openhands_rl_plugin.core.records import prompt_of
from openhands_rl_plugin.core.templates import template_for
from openhands_rl_plugin.core.types import EpisodeRequest, Limits, Task, Trajectory
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.hosts.pool import open_runner
from openhands_rl_plugin.hosts.shared.sessions import HostOptions

MOST_TOKENS = 700
TASK = "Make the test pass."
_WRONG, _RIGHT = "return a - b", "return a + b"
_TEST = "from calc import add\n\n\nassert add(2, 3) == 5\n"


@dataclass(frozen=True)
class Repair:
    """An episode, what the model was sent, and whether the test passes afterwards."""

    episode: Trajectory
    requests: list[dict[str, Any]]
    repaired: bool


def before_the_task(request: Mapping[str, Any]) -> str:
    """A prompt as a ChatML template of a model with tools renders it, up to the task."""
    system, user = (text_of(message["content"]) or "" for message in request["messages"][:2])
    instructed = template_for("qwen2.5").system(system, request.get("tools") or ())
    return f"<|im_start|>system\n{instructed}<|im_end|>\n<|im_start|>user\n{user[: user.index(TASK)]}"


async def repair(server: ScriptedModel, folder: Path, prompt: PromptName, *, editor: str, shell: str) -> Repair:
    """Look, run the test, err in the edit, correct it, run the test, finish."""
    repository = folder / "repository"
    repository.mkdir(parents=True)
    (repository / "calc.py").write_text(f"def add(a, b):\n    {_WRONG}\n")
    (repository / "test_calc.py").write_text(_TEST)
    file = "/workspace/repository/calc.py"
    edit = {"command": "str_replace", "path": file, "old_str": _WRONG, "new_str": _RIGHT, "security_risk": "MEDIUM"}
    # Without -B an edit of the same length in the same second would leave the compiled file in use.
    check = {"command": "cd /workspace/repository && python3 -B test_calc.py", "security_risk": "MEDIUM"}
    calls: list[tuple[str, Mapping[str, str]]] = [
        (editor, {"command": "view", "path": file, "security_risk": "LOW"}),
        (shell, check),
        (editor, {**edit, "old_str": "return a * b"}),
        (editor, edit),
        (shell, check),
        ("finish", {"message": "It passes."}),
    ]
    model = f"{folder.name}-{prompt}"
    answers = (reply("So.", call(name, given, f"call-{number}")) for number, (name, given) in enumerate(calls))
    server.script(model, answers)
    episode = await _record(server, folder, model, prompt, native=True)
    repaired = (repository / "calc.py").read_text() == f"def add(a, b):\n    {_RIGHT}\n"
    return Repair(episode, server.requests[model], repaired)


async def check_one_sequence(
    server: ScriptedModel, folder: Path, prompt: PromptName, *, editor: str, shell: str
) -> Repair:
    """Calls that a small model writes almost as the host does: what it wrote is what it is shown, so that each prompt
    extends the one before."""
    (folder / "repository").mkdir(parents=True)
    risk = "<parameter=security_risk>LOW</parameter>\n"
    file = "/workspace/repository/a.txt"
    create = f"<parameter=command>create</parameter><parameter=path> {file}\n</parameter>"
    answers = [
        stopped(f"So.\n<function={shell}>\n<parameter=command>echo one</parameter>\n{risk}"),
        stopped(f"<function={editor}>{create}\n<parameter=file_text>a\nb</parameter>\n{risk}\n\n"),
        reply(f"\n\n<function={shell}>\n<parameter=command>\necho two\n</parameter>\n{risk}</function>"),
        {**reply(f"<function={shell}>\n<parameter=command>echo three</parameter>\n{risk}"), "stop_reason": None},
        reply("  It is done, I think. \n"),
        stopped("<function=finish>\n<parameter=message>Done.</parameter>\n"),
    ]
    model = f"{folder.name}-text-{prompt}"
    server.script(model, answers)
    episode = await _record(server, folder, model, prompt, native=False)
    acted = [episode.nodes[index] for index in episode.acted()]
    assert episode.failure is None and [node.message.content for node in acted] == [each["content"] for each in answers]
    assert [node.tokens and node.tokens.extends for node in acted] == [False, *[True] * 5]
    assert not any("replayed_as" in node.metadata for node in episode.nodes)
    shown = [text_of(each["content"]) for each in server.requests[model][-1]["messages"] if each["role"] == "assistant"]
    tails = ["</function>", "</function>", "", "", ""]
    assert shown == [each["content"] + tail for each, tail in zip(answers, tails, strict=False)]
    return Repair(episode, server.requests[model], repaired=False)


async def check_repaired_call(server: ScriptedModel, folder: Path, *, editor: str, shell: str) -> None:
    """A call that the host had to repair is shown as the host says it, and noted: it is another text than was
    sampled."""
    (folder / "repository").mkdir(parents=True)
    risk = "<parameter=security_risk>LOW</parameter>\n"
    look = "<parameter=command>view</parameter>\n<parameter=path>/workspace</parameter>\n"
    answers = [
        reply(f"<function={shell}>\n<parameter=command=echo one</parameter>\n{risk}</function>"),
        reply(f"<function={editor}>\n{look}{risk}"),
        reply("<function=finish>\n<parameter=message>Done.</parameter>\n"),
    ]
    model = f"{folder.name}-repaired"
    server.script(model, answers)
    episode = await _record(server, folder, model, "compact", native=False)
    acted = [episode.nodes[index] for index in episode.acted()]
    assert [node.message.content for node in acted] == [each["content"] for each in answers]
    requests = server.requests[model]
    repaired, whole = (message for message in requests[-1]["messages"] if message["role"] == "assistant")
    assert text_of(repaired["content"]) == answers[0]["content"].replace("command=echo", "command>echo")
    noted = acted[0].metadata["replayed_as"]
    assert isinstance(noted, dict) and noted["content"] == text_of(repaired["content"])
    assert text_of(whole["content"]) == answers[1]["content"] + "</function>" and "replayed_as" not in acted[1].metadata
    assert acted[1].tokens and not acted[1].tokens.extends


async def _record(server: ScriptedModel, folder: Path, model: str, prompt: PromptName, *, native: bool) -> Trajectory:
    settings = RLSettings(
        serving=ServingSettings(base_url=server.url, model=model, request_timeout=20.0),
        workspace=WorkspaceSettings(prompt=prompt),
    )
    limits = Limits(max_turns=10)
    task = Task(id="repair", environment="workspace", instruction=TASK, limits=limits)
    options = HostOptions(environment_mode=False, native_tool_calling=native)
    async with open_runner(settings, options) as runner:
        request = EpisodeRequest(task=task, run_id="r", group_id="g")
        return await runner.run(request, TaskWorkspace(root=folder, repository="repository"))


@cache
def smollm2() -> Tokenizer | None:
    """SmolLM2's tokenizer; ``None`` where the demo's model was never fetched."""
    file = default_model_directory() / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else None


def count_tokens(text: str) -> int:
    """Tokens of SmolLM2; without its tokenizer characters by 4.2, of which it needs fewer for these prompts."""
    tokenizer = smollm2()
    return len(tokenizer.encode(text, add_special_tokens=False).ids) if tokenizer else round(len(text) / 4.2)


async def check_both_prompts(server: ScriptedModel, folder: Path, *, editor: str, shell: str) -> tuple[Repair, Repair]:
    """The same repair under the standard and the compact prompt: both succeed, and the second is short.

    Its tools are recorded as they were sent.
    """
    standard = await repair(server, folder / "a", "standard", editor=editor, shell=shell)
    compact = await repair(server, folder / "b", "compact", editor=editor, shell=shell)
    for result in (standard, compact):
        assert result.repaired and result.episode.failure is None and len(result.episode.acted()) == 6
    assert [prompt_of(result.episode) for result in (standard, compact)] == ["standard", "compact"]
    short, long = (count_tokens(before_the_task(result.requests[0])) for result in (compact, standard))
    assert short <= MOST_TOKENS < 3000 < long
    offered = compact.requests[0]["tools"]
    names = {tool["function"]["name"] for tool in offered}
    assert names == {shell, editor, "finish"}
    assert list(compact.episode.tools) == offered
    return standard, compact
