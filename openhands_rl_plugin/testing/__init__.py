"""For tests of plugins: a scripted engine, a toy environment and a conformance check for each kind of plugin.

``ScriptedEngine`` samples its answers from a script, with token ids that extend from turn to turn as a server's do.
``GridEnvironment`` is a deterministic world that can be forked. A check raises ``AssertionError`` with the broken rule.

Examples:
    >>> import asyncio
    >>> from openhands_rl_plugin import StandardReActStrategy
    >>> asyncio.run(check_strategy(StandardReActStrategy()))
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from openhands_rl_plugin.core.errors import GraderError, InfrastructureError, ModelError, StorageError
from openhands_rl_plugin.core.protocols import Environment, LLMEngine, Reward, Strategy, TrajectoryStorage
from openhands_rl_plugin.core.records import (
    EpisodeEnd,
    EpisodeGrowth,
    EpisodeStart,
    Label,
    LabelKind,
    NodeMark,
    TrajectoryFilter,
    TrajectoryOrder,
)
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    Completion,
    Failure,
    FailureKind,
    JsonObject,
    Message,
    Node,
    Observation,
    PolicyRef,
    SamplingParams,
    Score,
    StopReason,
    StrategySpec,
    Task,
    Times,
    Tokens,
    ToolCall,
    Trajectory,
    Usage,
)

Script = Sequence[str] | Callable[[Sequence[Message]], str]

_ROLE_TOKENS, _END_TOKEN = {"system": 256, "user": 257, "assistant": 258, "tool": 259}, 260
_ASKED = (Message(role="system", content="Be brief."), Message(role="user", content="Say one word."))
_SAMPLING = SamplingParams(temperature=1.0, max_tokens=16, seed=7)


def encode(message: Message) -> tuple[int, ...]:
    """One message as the toy tokenizer has it: its role, the UTF-8 bytes of its text, an end."""
    return (_ROLE_TOKENS[message.role], *(message.content or "").encode(), _END_TOKEN)


def prompt_ids(messages: Sequence[Message]) -> tuple[int, ...]:
    """The whole prompt, up to where the assistant speaks."""
    return (*(token for message in messages for token in encode(message)), _ROLE_TOKENS["assistant"])


class ScriptedEngine:
    """Answers from a script: texts used in order (one for each of ``n``), or a function of the conversation.

    Raises ``ModelError`` when the texts are used up. ``calls`` holds the conversations that were asked about.
    """

    def __init__(self, script: Script, *, policy: PolicyRef | None = None) -> None:
        self.calls: list[tuple[Message, ...]] = []
        self._script = script if callable(script) else iter(script)
        self._policy = policy or PolicyRef(base_model="scripted")

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """The next ``n`` texts of the script."""
        self.calls.append(tuple(messages))
        script, prompt = self._script, prompt_ids(messages)
        texts = [script(messages) for _ in range(n)] if callable(script) else [*islice(script, n)]
        if len(texts) < n:
            raise ModelError("the script is over")
        return [self._sampled(prompt, text, sampling) for text in texts]

    def _sampled(self, prompt: tuple[int, ...], text: str, sampling: SamplingParams | None) -> Completion:
        ids = encode(message := _answer(text))[1:]
        return Completion(
            message=message,
            tokens=Tokens.of(prompt, ids, (-math.log(2),) * len(ids)),
            finish_reason="stop",
            usage=Usage(prompt_tokens=len(prompt), completion_tokens=len(ids), calls=1),
            policy=self._policy,
            sampling=sampling,
        )


class GridEnvironment:
    """Walk from (0, 0) to ``data["goal"]`` (default ``[2, 2]``) on a square of 3 cells a
    side. The last word of an answer is the move: up, down, left or right. Reaching the goal earns 1.0, all else 0.0.
    """

    MOVES: ClassVar = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
    closed = False
    _at: tuple[int, ...] = (0, 0)
    _rewards: tuple[float, ...] = ()

    async def reset(self, task: Task) -> Observation:
        """Stand in the corner."""
        goal: Any = task.data.get("goal", (2, 2))
        self._goal = tuple(goal)
        rules = f"Walk to {self._goal}. Answer with up, down, left or right. {task.instruction}".strip()
        return Observation(messages=(Message(role="system", content=rules), self._state()))

    async def step(self, action: Message) -> Observation:
        """Walk, or stay where a wall or a word that is no move is in the way."""
        words = (action.content or "").lower().split()
        if (move := self.MOVES.get(words[-1].strip(".!") if words else "")) is None:
            self._rewards += (0.0,)
            refusal = Message(role="user", content="Invalid action: the last word must be up, down, left or right.")
            return Observation(messages=(refusal,))
        self._at = tuple(min(max(at + by, 0), 2) for at, by in zip(self._at, move, strict=True))
        arrived = self._at == self._goal
        self._rewards += (float(arrived),)
        return Observation(messages=(self._state(),), reward=float(arrived), terminated=arrived)

    async def evidence(self) -> JsonObject:
        """The final position, the return, and the number of steps."""
        return {"final_state": list(self._at), "return": sum(self._rewards), "steps": len(self._rewards)}

    async def close(self) -> None:
        """Nothing is held; ``closed`` shows that it was called."""
        self.closed = True

    async def fork(self) -> GridEnvironment:
        """A copy that walks on from here by itself."""
        return copy.copy(self)

    def _state(self) -> Message:
        return Message(role="user", content=f"You are at {self._at}.")


async def check_environment(make: Callable[[], Environment], task: Task, *, actions: Sequence[str]) -> None:
    """Execute ``actions`` (valid ones, that do not end the episode too early) in environments that ``make`` returns.

    Asserts what sessions rely on: an opening, finite rewards, malformed actions answered, evidence that is JSON,
    repeatable close, episodes that do not disturb each other, and independent forks where forking is offered.
    """
    await make().close()
    first, second = make(), make()
    opening = await first.reset(task)
    assert {message.role for message in opening.messages} - {"assistant"}, "reset must return at least one message"
    await second.reset(task)
    steps = await _stepped(first, actions)
    assert await _stepped(second, actions) == steps, "two episodes disturb each other, or are not deterministic"
    malformed = make()
    await malformed.reset(task)
    for text in ("", "\N{REPLACEMENT CHARACTER}", "Thought: no action in here"):
        observation = await malformed.step(_answer(text))
        assert observation.messages, f"step({text!r}) must answer what was wrong with the action"
        if observation.terminated or observation.truncated:
            break
    for environment in (first, malformed):
        evidence = await environment.evidence()
        assert json.loads(json.dumps(evidence, allow_nan=False)) == evidence, "evidence() must come back equal as JSON"
    for environment in (first, first, second, malformed):
        await environment.close()
    forked: Any = make()
    if hasattr(forked, "fork"):
        await forked.reset(task)
        before, twin = await forked.evidence(), await forked.fork()
        in_twin = await _stepped(twin, actions)
        assert await forked.evidence() == before, "a step in a fork changed the original"
        await twin.close()
        assert await _stepped(forked, actions) == in_twin, "the original goes another way than its fork"
    await forked.close()


async def _stepped(environment: Any, actions: Sequence[str]) -> list[tuple[Message, ...]]:
    steps = [await environment.step(_answer(action)) for action in actions]
    assert all(math.isfinite(step.reward) for step in steps), "rewards must be finite"
    return [step.messages for step in steps]


async def check_engine(engine: LLMEngine, *, away: LLMEngine | None = None) -> None:
    """Ask ``engine`` for one answer, for three, for two side by side, and to go on from an answer.

    Asserts what strategies and training rely on: as many completions as were asked for, each an assistant message that
    with what it was sampled with and from; whole prompts with as many logprobs as ids, where there are ids; the
    limit of tokens kept. ``away``: the same engine with a server that does not answer, which must raise
    ``InfrastructureError`` or ``ModelError``: anything else would end the whole run, not the episode.
    """
    (answer,) = await _asked(engine, _ASKED, 1)
    await _asked(engine, _ASKED, 3)
    await asyncio.gather(_asked(engine, _ASKED, 1), _asked(engine, _ASKED, 2))
    (later,) = await _asked(engine, (*_ASKED, answer.message, Message(role="user", content="Another one.")), 1)
    if answer.tokens and later.tokens:
        longer = len(later.tokens.prompt_ids) > len(answer.tokens.prompt_ids)
        assert longer, "the prompt of a longer conversation is not longer; prompt_ids is the whole prompt"
    if away is not None:
        (outcome,) = await asyncio.gather(away.complete(_ASKED, sampling=_SAMPLING), return_exceptions=True)
        assert isinstance(outcome, BaseException), "the engine answered without its server"
        known = isinstance(outcome, InfrastructureError | ModelError)
        assert known, f"without its server the engine raised {outcome!r}; raise InfrastructureError or ModelError"


async def _asked(engine: LLMEngine, messages: tuple[Message, ...], n: int) -> list[Completion]:
    answers = await engine.complete(messages, n=n, sampling=_SAMPLING)
    assert len(answers) == n, f"complete(n={n}) must return a list of {n} completions"
    for answer in answers:
        sampling, tokens = answer.sampling, answer.tokens
        assert answer.message.role == "assistant", "the message of a completion is the assistant's"
        assert answer.policy is not None, "a completion must name its policy"
        assert sampling and sampling.temperature == 1.0, "a completion must have what it was sampled with"
        assert answer.usage.completion_tokens <= 16, "max_tokens was 16"
        if tokens is not None:
            assert not tokens.extends, "an engine gives the whole prompt (extends false); the tree finds what it adds"
            assert tokens.prompt_ids and tokens.sampled_ids, "where the server gives no ids, tokens is None"
            complete = len(tokens.logprobs) in (0, len(tokens.sampled_ids))
            assert complete, "there must be a logprob for each sampled id, or none at all"
            assert all(each <= 1e-3 for each in tokens.logprobs), "a logprob is at most 0, and not NaN"
    return answers


async def check_strategy(strategy: Strategy, *, engine: LLMEngine | None = None) -> None:
    """Roll out a short grid episode with ``strategy``, which may fork the world; look at the tree after each turn."""
    world = GridEnvironment()
    engine = engine or ScriptedEngine(lambda messages: "right" if len(messages) // 2 % 2 else "down")
    tree = EpisodeTree()
    tree.observe(await world.reset(Task(id="grid", environment="grid")))
    for _ in range(3):
        head, before, standing = tree.head, [node.message for node in tree.nodes], await world.evidence()
        chosen = await strategy.decide(tree, engine, world)
        assert tree.head == head, "decide() must not move tree.head; the session commits the node that is returned"
        assert [node.message for node in tree.nodes[: len(before)]] == before, "decide() changed messages in the tree"
        proposed = tree.nodes[chosen].sampled and tree.nodes[chosen].parent == head
        assert proposed, "decide() must return a node of tree.propose() directly below tree.head"
        assert await world.evidence() == standing, "decide() stepped the real world; search must work in forks of it"
        tree.commit(chosen)
        tree.observe(await world.step(tree.action))


async def check_reward(reward: Reward, trajectories: Sequence[Trajectory]) -> None:
    """Score ``trajectories`` twice, and a failed one, which must not get a number."""
    assert reward.version, "a reward needs a version"
    for trajectory in trajectories:
        before = trajectory.model_dump_json()
        score = await reward(trajectory)
        assert score.trajectory_id == trajectory.id, "the score names another trajectory"
        assert score.reward_version == reward.version, "the score is of another version"
        assert score.reward is None or math.isfinite(score.reward), f"the score is {score.reward}; raise GraderError"
        assert await reward(trajectory) == score, "the same trajectory got two scores"
        assert trajectory.model_dump_json() == before, "the reward changed the trajectory"
    with suppress(GraderError):
        unscorable = await reward(example_trajectory(3))
        assert unscorable.reward is None, "an episode that failed got a number; raise GraderError instead"


def _answer(text: str) -> Message:
    return Message(role="assistant", content=text)


Step = EpisodeStart | EpisodeGrowth | EpisodeEnd

_POLICY = PolicyRef(base_model="base", adapter="shop", version=7)
GONE = Failure(kind=FailureKind.INFRASTRUCTURE, message="the server went away", boundary="environment.step")
"""Why the failed samples failed."""

# The nodes that belong together: asked and answered (with a sibling that was not acted), seen and answered, seen.
_CUTS = (0, 3, 5, 6)


def sample_score(trajectory_id: str, reward: float | None, version: str = "test-1") -> Score:
    """A judgement of one of the episodes."""
    return Score(trajectory_id=trajectory_id, reward=reward, reward_version=version, detail={"why": "\N{HOT BEVERAGE}"})


def sample_episode(
    identity: str,
    *,
    policy: PolicyRef = _POLICY,
    reward: float = 0.5,
    finished: float = 2000.0,
    text: str = "",
    stop: StopReason = StopReason.TERMINATED,
    failure: Failure | None = None,
    **named: str,
) -> Trajectory:
    """Two turns, a sibling that was not acted, tokens with odd logprobs, and ``reward`` as the return.

    ``named``: its ``run``, ``group``, ``task``, ``environment``, ``split`` and ``strategy``.
    """
    of = {"run": "run", "group": "group", "task": "task", "environment": "grid", "split": "train"} | named
    task = {"id": of["task"], "environment": of["environment"], "instruction": "Walk.", "split": of["split"]}
    call = ToolCall(id="call-1", name="search", arguments='{"query": "\\u2615",\n}')
    answer = partial(
        Node,
        message=Message(role="assistant", tool_calls=(call,)),
        sampled=True,
        policy=policy,
        sampling=SamplingParams(temperature=1.0),
        finish_reason="tool_calls",
        metadata={"response": {"id": "answer", "cost": 0.1}},
    )
    second = Tokens.of((5,), (6, 2**32 - 1), (-1e-45, -0.5), extends=True)
    nodes = (
        Node(parent=None, message=Message(role="system", content=f"You walk. \N{HOT BEVERAGE} {text}")),
        answer(parent=0, tokens=Tokens.of((1, 2, 70_000), (3, 4), (-0.1, -0.0)), reward=-0.25),
        answer(parent=0, value=0.125, visits=3),
        Node(parent=1, message=Message(role="tool", content="a\u0000b\r\n", tool_call_id="call-1", name="search")),
        answer(parent=3, tokens=second, reward=reward + 0.25),
        Node(parent=4, message=Message(role="user", content="")),
    )
    return Trajectory(
        id=identity,
        run_id=of["run"],
        group_id=of["group"],
        task=Task.model_validate({**task, "data": {"goal": [1, None]}}),
        strategy=StrategySpec(name=named.get("strategy", "StandardReAct"), options={"width": 2}),
        policy=policy,
        nodes=nodes,
        head=5,
        stop=stop,
        tools=({"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}},),
        evidence={"steps": 2, "text": text},
        failure=failure,
        usage=Usage(prompt_tokens=4, cached_tokens=1, completion_tokens=4, calls=3, steps=2),
        times=Times(started=finished - 2.5, finished=finished),
    )


def example_trajectory(at: int = 0) -> Trajectory:
    """A short, valid trajectory of a grid episode; ``at`` % 4 == 3 is one that failed.

    Others end at the goal when ``at`` is even and at the limit of turns when it is odd.
    """
    failed, arrived = at % 4 == 3, at % 2 == 0
    return sample_episode(
        f"00000000-0000-4000-8000-{at:012d}",
        policy=PolicyRef(base_model="scripted"),
        reward=float(arrived),
        finished=1005.0 + 10 * at,
        group=f"group-{at // 2}",
        task=f"grid-{at}",
        stop=StopReason.ERROR if failed else StopReason.TERMINATED if arrived else StopReason.MAX_TURNS,
        failure=GONE if failed else None,
    )


def steps_of(sample: Trajectory) -> tuple[Step, ...]:
    """How ``sample`` is stored while it runs: the reward of an answer is known one growth after the answer."""
    growths = (
        EpisodeGrowth(
            trajectory_id=sample.id,
            first=first,
            nodes=tuple(node.model_copy(update={"reward": None}) for node in sample.nodes[first:until]),
            head=1 if first == 0 else until - 1,
            marks=() if first == 0 else (NodeMark(index=acted, reward=sample.nodes[acted].reward),),
        )
        for first, until, acted in zip(_CUTS, _CUTS[1:], (0, 1, 4), strict=False)
    )
    return (EpisodeStart.of(sample), *growths, EpisodeEnd.of(sample))


def unrewarded(sample: Trajectory) -> Trajectory:
    """The episode, no step of which was rewarded."""
    return sample.model_copy(update={"nodes": tuple(each.model_copy(update={"reward": None}) for each in sample.nodes)})


# What an episode has that no other one has (the arguments of the sample), and what finds it.
_ODD: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    *(({name: f"../other {name}"}, {f"{name}_id": f"../other {name}"}) for name in ("group", "task")),
    *(({name: f"../other {name}"}, {name: f"../other {name}"}) for name in ("environment", "split", "strategy")),
    ({"policy": PolicyRef(base_model="other", adapter="other", version=8)}, {"adapter": "other", "policy_version": 8}),
    ({"stop": StopReason.MAX_TURNS}, {"stop": StopReason.MAX_TURNS}),
    ({"stop": StopReason.ERROR, "failure": GONE, "reward": 9.0}, {"failed": True}),
    ({"reward": 0.875}, {"reward_at_least": 0.75}),
    ({"reward": -9.0}, {"reward_at_most": 0.25}),
    ({"finished": 2010.0}, {"since": 2010.0}),
    ({"finished": 1990.0}, {"until": 1999.0}),
)
_WHERE: tuple[dict[str, Any], ...] = (
    *(asked for _, asked in _ODD),
    *({"contains": "ther t"}, {"label": "good"}, {"finished": False}, {"ids": ("judged", "nobody")}, {"limit": 0}),
    *({"sort": sort, "offset": 1, "limit": 9} for sort in TrajectoryOrder),
)


def _operations() -> Iterator[tuple[str, Any]]:
    """The methods that are called, in order, and what they are given; after ``close`` the store is opened anew."""
    sample = sample_episode("judged")
    start, *growths, end = steps_of(sample)
    yield from (("grow", growths[0]), ("end", end))  # nobody began it
    for name, step in (("begin", start), *(("grow", each) for each in growths), ("end", end)):
        yield from ((name, step), (name, step), ("grow", growths[-1].model_copy(update={"first": 9})), ("close", None))
    yield "add", sample.model_copy(update={"head": 1})
    yield from (("begin", EpisodeStart.of(sample_episode(name))) for name in ("replaced", "dropped", "open"))
    yield "add_scores", [sample_score("dropped", 0.125)]
    yield "add", sample_episode("replaced")
    yield "drop", ["dropped", "nobody", "judged"]
    yield from (("add_scores", [sample_score("judged", reward)]) for reward in (0.25, 0.25, 0.75))
    label = Label(id="1", trajectory_id="judged", kind=LabelKind.TAG, text="good", at=0.0)
    yield from (("add_labels", [label]), ("add_labels", [label]))
    yield from (("add", sample_episode(f"odd {at}", **given)) for at, (given, _) in enumerate(_ODD))
    yield "add", unrewarded(sample_episode("unknown"))
    yield "close", None


async def check_storage(make: Callable[[], TrajectoryStorage]) -> None:
    """Write, read, filter, sort, score and reopen, as ``FileTrajectoryStorage`` does it.

    Every ``make()`` opens the same store, which starts empty. Raises ``AssertionError`` that names what differs.
    """
    from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

    with TemporaryDirectory() as folder:
        storage, other = make(), FileTrajectoryStorage(folder, durable=False)
        assert not await storage.count(TrajectoryFilter(finished=None)), "the store must be empty at the start"
        for name, given in _operations():
            result, wanted = [await _outcome(each, name, given) for each in (storage, other)]
            assert result == wanted, f"{name}({given!s:.200}) returned or raised {result}, not {wanted}"
            if name == "close":
                storage, other = make(), FileTrajectoryStorage(folder, durable=False)
            await _compare(storage, other, TrajectoryFilter(finished=None), f"after {name}(), ")
        for asked in _WHERE:
            await _compare(storage, other, TrajectoryFilter.model_validate({"finished": None, **asked}), "")
        await asyncio.gather(storage.close(), other.close())


async def _outcome(storage: TrajectoryStorage, name: str, given: Any) -> Any:
    try:
        return await getattr(storage, name)(*([] if name == "close" else [given]))
    except StorageError:
        return StorageError


async def _compare(storage: TrajectoryStorage, other: TrajectoryStorage, where: TrajectoryFilter, when: str) -> None:
    what = f"{when}{where.model_dump(exclude_defaults=True)}"
    found, wanted = [[(_timeless(one), scores) async for one, scores in each.find(where)] for each in (storage, other)]
    ids, others = [[one.id for one, _ in each] for each in (found, wanted)]
    assert ids == others, f"{what}: find() found {ids}, not {others}"
    for (one, scores), (expected, judged) in zip(found, wanted, strict=True):
        wrong = [name for name, value in one if value != getattr(expected, name)]
        assert not wrong, f"{what}: {one.id!r} has other {', '.join(wrong)} than were stored"
        assert scores == judged, f"{what}: {one.id!r} has the scores {scores}, not {judged}"
    listed, known = [[_timeless(one) async for one in each.summaries(where)] for each in (storage, other)]
    assert listed == known, f"{what}: summaries() listed {listed}, not {known}"
    for name, given in (("count", where), ("scores", ids), ("labels", ids)):
        result, expected = [await getattr(each, name)(given) for each in (storage, other)]
        assert result == expected, f"{what}: {name}() returned {result}, not {expected}"


def _timeless(episode: Any) -> Any:
    """An unfinished episode has the time at which it grew."""
    return episode.model_copy(update={"times": None} if episode.stop is StopReason.UNFINISHED else {})
