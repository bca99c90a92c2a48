"""Episodes as events of the SDK and back: with rewritten histories, parallel calls and images."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from openhands_rl_plugin.core.messages import to_wire
from openhands_rl_plugin.core.tree import EpisodeTree, HostConversation
from openhands_rl_plugin.core.types import (
    Completion,
    EpisodeRequest,
    Message,
    PolicyRef,
    StopReason,
    StrategySpec,
    Task,
    Times,
    ToolCall,
    Trajectory,
)
from openhands_rl_plugin.trajectories.exchange.events import read_conversations, v1_rows

POLICY = PolicyRef(base_model="m")


class Play:
    """A host that shows the model what it likes, recorded as hosts record it."""

    def __init__(self) -> None:
        self.tree = EpisodeTree(tools=[{"type": "function", "function": {"name": "look", "parameters": {}}}])
        self.shown = [Message(role="system", content="Be good."), Message(role="user", content="Look.")]
        self._followed = HostConversation(self.tree)
        self._calls = 0

    def answer(self, calls: int, text: str | None = None) -> None:
        """The model's answer to what is shown, and a result for each call."""
        self._followed.follow([to_wire(message) for message in self.shown])
        made = [self._call() for _ in range(calls)]
        said = Message(role="assistant", content=text, tool_calls=tuple(made))
        at = self.tree.propose(Completion(message=said, policy=POLICY))
        self._followed.acted(at)
        results = [Message(role="tool", content=f"saw {each.id}", tool_call_id=each.id, name="look") for each in made]
        self.shown += [said, *(results or [Message(role="user", content="Go on.")])]

    def _call(self) -> ToolCall:
        self._calls += 1
        return ToolCall(id=f"c{self._calls}", name="look", arguments=f'{{"at":  {self._calls}}}')

    def groups(self) -> list[list[Message]]:
        """What is shown, with the results of an answer's calls beside it."""
        found: list[list[Message]] = []
        for message in self.shown:
            found[-1].append(message) if message.role == "tool" else found.append([message])
        return found

    def end(self) -> Trajectory:
        task = Task(id="t", environment="openhands", instruction="Look.")
        return self.tree.freeze(
            EpisodeRequest(task=task, run_id="r", group_id="g"),
            trajectory_id="e",
            strategy=StrategySpec(name="react"),
            policy=POLICY,
            stop=StopReason.TERMINATED,
            times=Times(started=1.0, finished=2.0),
        )


def written(trajectory: Trajectory, folder: Path) -> Path:
    for name, row in v1_rows(trajectory, ()):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(row))
    return folder


def there_and_back(trajectory: Trajectory, folder: Path) -> Trajectory:
    [unit] = read_conversations(written(trajectory, folder))
    return unit.read().trajectory


def prompts(trajectory: Trajectory) -> list[list[Message]]:
    """Each answer that was acted on, with its prompt."""
    return [
        [each.model_copy(update={"content": each.content or None}) for each in trajectory.messages(at)]
        for at in trajectory.acted()
    ]


def condense(play: Play, draw: random.Random) -> None:
    """As the SDK's condensers: some of the middle is gone, its summary in its place or merged into the words before."""
    head, *middle, last = play.groups()[1:]
    kept = middle[draw.randint(0, len(middle)) :]
    summary = f"What was: {draw.random()}"
    merged = draw.random() < 0.3
    begun = [Message(role="user", content=f"{head[0].content}\n{summary}")] if merged else [*head]
    told = [] if merged or draw.random() < 0.2 else [Message(role="user", content=summary)]
    play.shown = [play.shown[0], *begun, *told, *(each for group in (*kept, last) for each in group)]


def rewrite(play: Play, draw: random.Random) -> None:
    """As no condenser does: an answer's words, or a result, say something else now."""
    at = draw.randrange(2, len(play.shown) - 1)
    play.shown[at] = play.shown[at].model_copy(update={"content": f"hidden {draw.random()}"})


@pytest.mark.parametrize("seed", range(40))
def test_every_answer_comes_back_below_the_prompt_that_it_answered(seed: int, tmp_path: Path) -> None:
    draw, play = random.Random(seed), Play()
    for _ in range(14):
        play.answer(draw.choice([0, 1, 1, 1, 2, 3]), draw.choice([None, "Well.", "So."]))
        if len(play.groups()) > 4 and draw.random() < 0.4:
            draw.choice([condense, condense, rewrite] if seed % 2 else [condense])(play, draw)
    episode = play.end()
    found = there_and_back(episode, tmp_path)
    assert len(prompts(episode)) == 14
    assert prompts(found) == prompts(episode)


def test_images_are_named_as_in_a_recorded_prompt(tmp_path: Path) -> None:
    """The SDK keeps several in a part; the model is sent a part for each."""
    text, urls = {"type": "text", "text": "What is it?"}, {"type": "image", "image_urls": ["data:a", "data:b"]}
    said = {"kind": "MessageEvent", "source": "user", "llm_message": {"role": "user", "content": [text, urls]}}
    seen = {"kind": "ObservationEvent", "source": "environment", "tool_call_id": "c", "tool_name": "look"}
    shown: dict[str, object] = {"kind": "BrowserObservation", "content": [text, urls], "is_error": False}
    file = tmp_path / "conversation.jsonl"
    file.write_text("\n".join(map(json.dumps, [{"id": "1", **said}, {"id": "2", **seen, "observation": shown}])))
    [unit] = read_conversations(file)
    found = unit.read().trajectory
    assert [each.content for each in found.messages()] == ["What is it?\n[image_url]\n[image_url]"] * 2
    assert there_and_back(found, tmp_path / "again").messages() == found.messages()
