"""The likeliest answer that the episode has not acted on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from search_worlds import opened, planning, report

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.core.errors import ConfigError, ModelError
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Completion, Message, SamplingParams, Tokens, Usage
from openhands_rl_plugin.rollout.strategies.budget import SearchBudget
from openhands_rl_plugin.rollout.strategies.next_best import NextBestOptions, NextBestStrategy
from openhands_rl_plugin.testing import ScriptedEngine, check_strategy


class Ranked:
    """A policy that finds texts more or less likely. Greedily it says the likeliest, hot the others in turn."""

    def __init__(
        self, logprobs: dict[str, float], drawn: Sequence[str], *, says_logprobs: bool = True, refuses: str = ""
    ) -> None:
        """``refuses``: a sampling parameter that only its neutral value is taken of."""
        self.asked: list[tuple[int, SamplingParams]] = []
        self._logprobs = logprobs
        self._drawn = drawn
        self._says = says_logprobs
        self._refuses = refuses

    async def complete(
        self, messages: Sequence[Message], *, n: int = 1, sampling: SamplingParams, **_: Any
    ) -> list[Completion]:
        self.asked.append((n, sampling))
        if self._refuses and getattr(sampling, self._refuses) not in (None, 0.0, 1.0):
            raise ModelError(f"400: unknown parameter {self._refuses}")
        greedy = sampling.temperature == 0
        return [self._completion(text) for text in ([self._likeliest()] if greedy else self._drawn[:n])]

    def _likeliest(self) -> str:
        return max(self._logprobs, key=self._logprobs.__getitem__)

    def _completion(self, text: str) -> Completion:
        logprobs = (self._logprobs[text],) if self._says and text in self._logprobs else ()
        tokens = Tokens(prompt_ids=(1,), sampled_ids=(2,), logprobs=logprobs)
        return Completion(message=Message(role="assistant", content=text), tokens=tokens, usage=Usage(calls=1))


LIKELY = {"left": -0.1, "right": -1.0, "down": -2.0, "up": -5.0}


async def play(engine: Ranked, turns: int, **options: object) -> tuple[EpisodeTree, list[str]]:
    world = planning()
    tree, strategy = await opened(world), NextBestStrategy(None, **options)
    said: list[str] = []
    for _ in range(turns):
        tree.commit(await strategy.decide(tree, engine, world))  # type: ignore[arg-type]
        said.append(tree.action.content or "")
        tree.append(Message(role="user", content="that did not help"))
    return tree, said


async def test_it_keeps_the_rules_of_strategies():
    turns = iter(["down", "right", "left"] * 5000)
    await check_strategy(NextBestStrategy(), engine=ScriptedEngine(lambda messages: next(turns)))


async def test_it_goes_down_the_ranking_and_then_starts_again():
    engine = Ranked(LIKELY, ["up", "down", "right", "left"])
    _, said = await play(engine, 5)
    assert said == ["left", "right", "down", "up", "left"]
    greedy = (1, 0.0)
    asked = [(n, sampling.temperature) for n, sampling in engine.asked]
    assert asked == [greedy, *[greedy, (4, 1.0)] * 4]
    assert {(sampling.temperature, sampling.min_p) for _, sampling in engine.asked} == {(0.0, None), (1.0, None)}


async def test_a_greedy_answer_that_is_new_is_all_that_is_asked_for():
    engine = Ranked(LIKELY, ["up"])
    tree, _ = await play(engine, 1)
    engine._logprobs = {**LIKELY, "down": 0.0}
    strategy = NextBestStrategy()
    chosen = await strategy.decide(tree, engine, None)  # type: ignore[arg-type]
    assert tree.nodes[chosen].message.content == "down" and len(engine.asked) == 2


async def test_without_logprobs_the_answer_that_was_drawn_most_often_is_taken():
    engine = Ranked(LIKELY, ["up", "down", "down", "left"], says_logprobs=False)
    _, said = await play(engine, 3)
    assert said == ["left", "down", "up"]


async def test_an_answer_without_logprobs_is_not_the_likeliest():
    _, said = await play(Ranked(LIKELY, ["sideways", "down", "sideways"]), 2)
    assert said == ["left", "down"]


async def test_turns_before_the_history_was_rewritten_count():
    engine = Ranked(LIKELY, ["up", "down", "right", "left"])
    tree, _ = await play(engine, 1)
    tree.head = None
    tree.head = tree.append(Message(role="user", content="a summary of what was done"))
    chosen = await NextBestStrategy().decide(tree, engine, None)  # type: ignore[arg-type]
    assert tree.nodes[chosen].message.content == "right"


async def test_an_answer_that_the_host_could_not_read_counts():
    engine, strategy, tree = (
        Ranked(LIKELY, ["up", "down", "right", "left"]),
        NextBestStrategy(),
        await opened(planning()),
    )
    await strategy.decide(tree, engine, None)  # type: ignore[arg-type]
    tree.head = tree.append(
        Message(role="user", content="that is no action")
    )  # beside the answer, as OpenHands V0 does
    chosen = await strategy.decide(tree, engine, None)  # type: ignore[arg-type]
    assert tree.nodes[chosen].message.content == "right"


async def test_a_server_without_the_ways_of_drawing_is_asked_greedily_and_at_temperature_1():
    engine = Ranked(LIKELY, ["up", "down", "right", "left"], refuses="min_p")
    _, said = await play(engine, 3)
    assert said == ["left", "right", "down"]
    with pytest.raises(ModelError, match="min_p"):
        await play(Ranked(LIKELY, ["up"], refuses="min_p"), 2, sampling={"min_p": 0.2})


async def test_what_it_spent_is_reported_and_bounded():
    engine = Ranked(LIKELY, ["up", "down", "right", "left"])
    tree, said = await play(engine, 4, episode_budget=SearchBudget(calls=6))
    assert said == ["left", "right", "left", "left"], "greedy when the budget is spent"
    told = [report(tree, at) for at in tree.path() if tree.nodes[at].sampled]
    assert [each["episode"]["calls"] for each in told] == [1, 6, 7, 8]  # type: ignore[index, call-overload]
    assert all(each["strategy"] == "NextBest" for each in told)


def test_options_without_effect_are_refused():
    assert registry.build("strategies", "NextBest", {"n": 2, "temperature": 1.5}).options.n == 2
    for name in ("value", "open_worlds", "step_timeout"):
        with pytest.raises(ConfigError, match=name):
            registry.build("strategies", "NextBest", {name: 1})
    with pytest.raises(ConfigError, match=r"sampling\.temperature has no effect"):
        NextBestStrategy(sampling={"temperature": 0.5})
    with pytest.raises(ConfigError, match=r"turn_budget\.calls"):
        NextBestStrategy(turn_budget={"calls": 0})
    assert NextBestStrategy(NextBestOptions(n=1)).forks == 0
