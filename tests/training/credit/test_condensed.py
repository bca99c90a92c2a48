"""An episode whose history a host condensed: every answer that was acted on is trained, once, in one rollout."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.messages import to_wire
from openhands_rl_plugin.core.records import EpisodeStart
from openhands_rl_plugin.core.tree import EpisodeTree, HostConversation
from openhands_rl_plugin.core.types import (
    Completion,
    EpisodeRequest,
    Message,
    Observation,
    PolicyRef,
    StopReason,
    StrategySpec,
    Task,
    Times,
    Tokens,
    Trajectory,
)
from openhands_rl_plugin.training.credit.credit import credited_samples
from openhands_rl_plugin.training.data.batch import samples_of
from openhands_rl_plugin.training.losses.losses import batch_weights, samples_from_rollouts
from openhands_rl_plugin.trajectories.storages.log import EpisodeHeader

pytestmark = pytest.mark.contract

POLICY = PolicyRef(base_model="m")
START = (Message(role="system", content="be good"), Message(role="user", content="mend it"))


class Host:
    """Plays turns as a host does: each prompt is built from scratch, and ``condense`` rewrites it."""

    def __init__(self) -> None:
        self.tree = EpisodeTree()
        self.conversation = HostConversation(self.tree)
        self.history = list(START)
        self.ids: dict[str, int] = {}
        self.answers = 0

    def turn(self, *, drop: bool = False) -> None:
        """An answer and what came of it; with ``drop`` the answer is never acted on."""
        self.conversation.follow([to_wire(message) for message in self.history])
        self.answers += 1
        said = Message(role="assistant", content=f"answer {self.answers}")
        sampled = (1000 + self.answers, 2000 + self.answers)
        tokens = Tokens(prompt_ids=self._prompt_ids(), sampled_ids=sampled, logprobs=(-0.5, -0.25))
        node = self.tree.propose(Completion(message=said, tokens=tokens, policy=POLICY))
        if drop:
            return
        self.conversation.acted(node)
        self.history += [said, Message(role="user", content=f"result {self.answers}")]

    def condense(self, keep: int) -> None:
        """A summary stands for all but the last ``keep`` messages."""
        summary = Message(role="user", content=f"summary after {self.answers}")
        self.history = [*START, summary, *self.history[len(self.history) - keep :]]

    def finished(self, name: str = "t", group: str = "g") -> Trajectory:
        self.tree.observe(Observation(messages=(Message(role="user", content="bye"),)))
        return self.tree.freeze(
            EpisodeRequest(task=Task(id="x", environment="e"), run_id="r", group_id=group),
            trajectory_id=name,
            strategy=StrategySpec(name="s"),
            policy=POLICY,
            stop=StopReason.TERMINATED,
            times=Times(started=0.0, finished=1.0),
        )

    def _prompt_ids(self) -> tuple[int, ...]:
        """An answer that was sampled keeps its ids; other messages are three ids each."""
        ids: list[int] = []
        for message in self.history:
            text = message.content or ""
            number = int(text.rpartition(" ")[2]) if text.startswith("answer") else 0
            base = self.ids.setdefault(text, 10 + 10 * len(self.ids))
            ids += (1000 + number, 2000 + number) if number else (base, base + 1, base + 2)
        return tuple(ids)


def condensed(name: str = "t", turns: Sequence[int] = (3, 3, 2), keep: int = 2, group: str = "g") -> Trajectory:
    host = Host()
    for number, length in enumerate(turns):
        if number:
            host.condense(keep)
        for _ in range(length):
            host.turn()
    return host.finished(name, group)


def trained(samples: Sequence) -> list[int]:
    return sorted(token for sample in samples for token, on in zip(sample.input_ids, sample.mask, strict=True) if on)


def test_every_sampled_token_of_every_segment_is_trained_once() -> None:
    episode = condensed()
    assert len(episode.acted()) == 8 and len(episode.ends()) == 3
    assert len([*episode.sampled(episode.head)]) == 2, "the last segment has two turns only"
    samples = samples_of(episode, 0.5)
    assert trained(samples) == sorted([1000 + at for at in range(1, 9)] + [2000 + at for at in range(1, 9)])
    assert [sum(sample.mask) for sample in samples] == [6, 6, 4]
    assert {sample.advantage for sample in samples} == {0.5}
    header = EpisodeHeader.begun(EpisodeStart.of(episode)).grown(episode.nodes, episode.head, 0.0, episode.evidence)
    assert (header.turns, header.episode_return) == (8, episode.known_return)


def test_a_dropped_answer_is_not_trained() -> None:
    host = Host()
    host.turn()
    host.turn(drop=True)
    host.turn()
    host.condense(2)
    host.turn()
    assert 1002 not in trained(samples_of(host.finished()))


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "dr-grpo"])
def test_a_rollout_of_five_segments_weighs_as_much_as_one(algorithm: str) -> None:
    settings = TrainingSettings(algorithm=algorithm)  # type: ignore[arg-type]
    episodes = [condensed("five", (2, 2, 2, 2, 2), group="g"), condensed("one", (10,), group="g")]
    credit = credited_samples(episodes, [1.0, 0.0], settings)
    assert [sample.trajectory_id for sample in credit] == ["five"] * 5 + ["one"]
    items = samples_from_rollouts(credit)
    weights = batch_weights(items, settings) * torch.tensor([float(len(item.positions)) for item in items])
    assert weights[:5].sum().item() == pytest.approx(weights[5].item()) == pytest.approx(0.5)
    advantages = {sample.trajectory_id: sample.advantage for sample in credit}
    assert advantages["five"] == pytest.approx(-advantages["one"]) and advantages["five"] > 0
