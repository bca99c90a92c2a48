"""The episode's tree; above all that the token deltas give every prompt back, whatever happened to the history."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from openhands_rl_plugin.core.arrays import Ids
from openhands_rl_plugin.core.tree import EpisodeTree
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
    Usage,
)

pytestmark = pytest.mark.contract

POLICY = PolicyRef(base_model="m", adapter="a", version=3)


def completion(prompt: tuple[int, ...] | None, sampled: tuple[int, ...] = (1,), text: str = "go") -> Completion:
    tokens = None if prompt is None else Tokens(prompt_ids=prompt, sampled_ids=sampled, logprobs=(-0.5,) * len(sampled))
    message = Message(role="assistant", content=text)
    return Completion(message=message, tokens=tokens, policy=POLICY, usage=Usage(calls=1, completion_tokens=2))


def observed(text: str, reward: float = 0.0, **flags: bool) -> Observation:
    return Observation(messages=(Message(role="user", content=text),), reward=reward, **flags)


def frozen(tree: EpisodeTree) -> Trajectory:
    task = Task(id="t", environment="e")
    return tree.freeze(
        EpisodeRequest(task=task, run_id="r", group_id="g"),
        trajectory_id="id",
        strategy=StrategySpec(name="StandardReAct"),
        policy=PolicyRef(base_model="m"),
        stop=StopReason.MAX_TURNS,
        times=Times(started=0, finished=1),
    )


def rebuilt_prompt(trajectory: Trajectory, leaf: int) -> Ids:
    """The whole prompt of a sampled node, from what is stored alone."""
    prompt = context = Ids()
    for index in trajectory.path(leaf):
        if (tokens := trajectory.nodes[index].tokens) is not None:
            prompt = (context if tokens.extends else Ids()) + tokens.prompt_ids
            context = prompt + tokens.sampled_ids
    return prompt


def test_the_usage_of_an_unfinished_episode_is_counted_from_its_nodes():
    tree = EpisodeTree()
    tree.observe(observed("state 0"))
    tree.propose(completion((5, 6), (1, 1)))
    tree.commit(tree.propose(completion((5, 6), (7,))))
    tree.observe(observed("state 1"))
    simulated = tree.propose(completion((5, 6, 7, 8), (9, 9)))
    tree.nodes[simulated].reward, tree.nodes[simulated].simulated = 1.0, True
    tree.propose(completion(None))
    unfinished = frozen(tree).model_copy(update={"stop": StopReason.UNFINISHED, "usage": Usage()})
    counted = Usage(prompt_tokens=2 + 2 + 4, completion_tokens=2 + 1 + 2, calls=4, steps=1)
    assert EpisodeTree.thaw(unfinished).usage == counted


IDS = st.lists(st.integers(0, 3), max_size=4).map(tuple)


class SearchTree(RuleBasedStateMachine):
    """Any mix of observing, proposing anywhere and committing; a model of the whole prompts runs beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = EpisodeTree()
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.contexts: dict[int, tuple[int, ...]] = {}

    @rule(text=st.text(max_size=3))
    def observe(self, text: str) -> None:
        self.tree.observe(observed(text))

    @rule(data=st.data(), new=IDS, sampled=IDS, kind=st.sampled_from(["extends", "rewritten", "no ids"]))
    def propose(self, data: st.DataObject, new: tuple[int, ...], sampled: tuple[int, ...], kind: str) -> None:
        parents = [None, *range(len(self.tree.nodes))]
        parent = data.draw(st.sampled_from(parents))
        base = self.tree.head if parent is None else parent
        if kind == "no ids":
            self.tree.propose(completion(None), parent=parent)
            return
        above = [at for at in (self.tree.path(base) if base is not None else ()) if at in self.contexts]
        prompt = (self.contexts[above[-1]] if above and kind == "extends" else ()) + new
        at = self.tree.propose(completion(prompt, sampled), parent=parent)
        self.prompts[at], self.contexts[at] = prompt, prompt + sampled

    @precondition(lambda self: any(node.sampled for node in self.tree.nodes))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        sampled = [at for at, node in enumerate(self.tree.nodes) if node.sampled]
        self.tree.commit(data.draw(st.sampled_from(sampled)))

    @precondition(lambda self: any(node.sampled for node in self.tree.nodes))
    @rule(data=st.data(), reward=st.floats(-1, 1), real=st.booleans())
    def judge(self, data: st.DataObject, reward: float, real: bool) -> None:
        node = self.tree.nodes[data.draw(st.sampled_from([at for at, n in enumerate(self.tree.nodes) if n.sampled]))]
        node.reward, node.simulated, node.value, node.visits = reward, not real, reward / 2, node.visits + 1
        node.metadata["search"] = {"seen": [node.visits]}

    @invariant()
    def it_thaws_as_it_was_frozen(self) -> None:
        trajectory = Trajectory.model_validate_json(frozen(self.tree).model_dump_json())
        thawed = EpisodeTree.thaw(trajectory)
        assert frozen(thawed) == trajectory
        assert (thawed.nodes, thawed.head, thawed.usage) == (self.tree.nodes, self.tree.head, self.tree.usage)
        assert all(thawed.children(at) == self.tree.children(at) for at in (None, *range(len(thawed.nodes))))
        assert {at: thawed.context_ids(at) for at in self.contexts} == self.contexts

    @invariant()
    def every_prompt_comes_back(self) -> None:
        trajectory = frozen(self.tree)
        assert {at: rebuilt_prompt(trajectory, at) for at in self.prompts} == self.prompts
        assert {at: self.tree.context_ids(at) for at in self.contexts} == self.contexts


TestSearchTree = SearchTree.TestCase
TestSearchTree.settings = settings(deadline=None, max_examples=40, stateful_step_count=25)
