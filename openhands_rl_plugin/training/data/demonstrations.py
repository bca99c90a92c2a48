"""Token ids of demonstrations, which no model sampled: rendered once with the model's own chat template.

Episodes of a policy have recorded ids and are never rendered again. What was imported, or recorded from a server that
gives no ids, has none, so they are made exactly as a server makes prompts. A turn whose prompt does not extend the one
before (a template that takes reasoning out of earlier turns) starts a new sequence; every answer is trained once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol, cast

from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.types import (
    ACTED,
    JsonObject,
    Message,
    Node,
    PolicyRef,
    Sample,
    Score,
    Tokens,
    Trajectory,
)
from openhands_rl_plugin.training.data.batch import samples_of
from openhands_rl_plugin.training.data.chat_forms import (
    RenderedMessage,
    TemplateTraits,
    WireMessages,
    traits_of,
    turns_for,
)
from openhands_rl_plugin.trajectories.exchange.episodes import STRATEGY, resolved, score_of

_CACHED_TEXTS = 4096


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    @property
    def special_tokens_map(self) -> Mapping[str, Any]:
        """``eos_token`` and others by name."""
        ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Id -> added token, which says whether it is special."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any:
        """Render a conversation; with ``tokenize=False`` the result is text."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text."""
        ...


class Tokenised(NamedTuple):
    """Episodes with token ids of ours. ``failed``: why others have none -> how many; ``unsaid``: what the template
    does not print -> in how many answers."""

    trajectories: tuple[Trajectory, ...]
    made: int
    failed: Counter[str]
    unsaid: Counter[str]


def is_demonstration(trajectory: Trajectory) -> bool:
    """Whether an episode has answers, and none of its nodes has token ids."""
    return any(node.sampled for node in trajectory.nodes) and not any(node.tokens for node in trajectory.nodes)


def is_imported(trajectory: Trajectory) -> bool:
    """Whether an episode is another program's record: its policy is not one of ours."""
    return trajectory.strategy.name == STRATEGY and is_demonstration(trajectory)


def demonstration_reward(trajectory: Trajectory, scores: Sequence[Score], reward_version: str) -> float | None:
    """The newest score of ``reward_version``; else what the record says of the outcome; ``None`` where it says nothing,
    and after a failure."""
    if trajectory.failure is not None:
        return None
    asked = [score.reward for score in scores if score.reward_version == reward_version][-1:]
    if asked and asked[0] is not None:
        return asked[0]
    judged = score_of(trajectory, scores)
    if judged is not None:
        return judged
    solved = resolved(trajectory, scores)
    return None if solved is None else float(solved)


def tokenised(trajectories: Sequence[Trajectory], tokenizer: ChatTokenizer) -> Tokenised:
    """All of them, in order, demonstrations with token ids; those that the template refuses stay without."""
    maker = TokenMaker(tokenizer)
    out: list[Trajectory] = []
    failed: Counter[str] = Counter()
    made = 0
    for trajectory in trajectories:
        rendered = trajectory
        if is_demonstration(trajectory):
            try:
                rendered = maker.with_tokens(trajectory)
                made += 1
            except TrainingError as error:
                failed[str(error)] += 1
        out.append(rendered)
    return Tokenised(tuple(out), made, failed, maker.unsaid)


def demonstration_samples(trajectory: Trajectory, tokenizer: ChatTokenizer) -> list[Sample]:
    """The sequences of one demonstration; the mask covers the answers, each with its end-of-turn token.

    Raises ``TrainingError`` when the template refuses the conversation or names no end of a turn.
    """
    return samples_of(TokenMaker(tokenizer).with_tokens(trajectory), need_logprobs=False)


class TokenMaker:
    """Token ids by one tokenizer. ``unsaid`` counts what its template leaves out of answers."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.unsaid: Counter[str] = Counter()
        self._tokenizer = tokenizer
        special = {str(each) for each in tokenizer.added_tokens_decoder.values() if each.special}
        self._eos = str(tokenizer.special_tokens_map.get("eos_token") or "")
        self._special = tuple(sorted(special | ({self._eos} - {""})))
        longest_first = sorted(self._special, key=lambda each: (-len(each), each))
        self._pieces = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None
        self._checked = False
        self._encode = lru_cache(_CACHED_TEXTS)(self._encode_text)

    @cached_property
    def traits(self) -> TemplateTraits:
        """What the template can say."""
        return traits_of(self.render)

    def render(self, messages: WireMessages, tools: Sequence[JsonObject], cue: bool) -> str:
        """The conversation as text. Raises ``TrainingError`` when the template refuses it."""
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=cue
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise TrainingError(f"the chat template refuses the conversation: {error}") from error
        return cast(str, text)

    def with_tokens(self, trajectory: Trajectory) -> Trajectory:
        """All that was acted on, as the template takes it, with token ids and without logprobs.

        Each path that a rewritten history left is a tree of its own; an answer is trained on the first of its paths.
        Raises ``TrainingError``.
        """
        nodes: list[Node] = []
        tools: tuple[JsonObject, ...] = ()
        seen: set[int] = set()
        for end in trajectory.ends():
            turns, tools = turns_for(trajectory, self.traits, end, seen)
            seen |= {*trajectory.path(end)}
            nodes += self._path(turns, tools, trajectory.policy, len(nodes))
        if not any(node.sampled for node in nodes):
            raise TrainingError("it has no answer that can be trained")
        return trajectory.model_copy(update={"nodes": tuple(nodes), "head": len(nodes) - 1, "tools": tools})

    def _path(
        self, turns: Sequence[RenderedMessage], tools: Sequence[JsonObject], policy: PolicyRef, first: int
    ) -> Iterator[Node]:
        """The nodes of one path; the first of them has the index ``first``."""
        held = ""
        for at, turn in enumerate(turns):
            tokens = None
            if turn.trained:
                self._count_unsaid(turn)
                prompt, answer = self._prompt_and_answer([each.wire for each in turns[: at + 1]], tools)
                extends = bool(held) and prompt.startswith(held)
                new = prompt[len(held) :] if extends else prompt
                tokens = Tokens(extends=extends, prompt_ids=self._ids(new), sampled_ids=self._ids(answer))
                held = prompt + answer
            yield Node(
                parent=first + at - 1 if at else None,
                message=Message(role=turn.wire["role"], content=turn.wire.get("content")),
                sampled=turn.trained,
                tokens=tokens,
                policy=policy if turn.trained else None,
                metadata={ACTED: True} if turn.trained else {},
            )

    def _prompt_and_answer(self, messages: WireMessages, tools: Sequence[JsonObject]) -> tuple[str, str]:
        """What the model is shown, and what it has to say to that, through the token that ends its turn."""
        prompt = self.render(messages[:-1], tools, True)
        whole = self.render(messages, tools, False)
        if not whole.startswith(prompt):
            raise TrainingError(
                "the chat template prints an answer otherwise than its generation prompt begins; use a template whose "
                "generation prompt is the beginning of an answer"
            )
        answer = whole[len(prompt) :]
        endings = self._endings(answer)
        if not endings:
            raise TrainingError(
                "the chat template ends an answer with no special token, so a turn's end cannot be trained; use a "
                "template that prints the tokenizer's end-of-turn token"
            )
        # Behind the end of the turn a template may print more; before it, a special token that closes a call.
        known = {self._end_of_text_answer, self._eos}
        end, _ = next((each for each in endings if each[1] in known), endings[0])
        return prompt, answer[:end]

    @cached_property
    def _end_of_text_answer(self) -> str | None:
        asked = {"role": "user", "content": "?"}
        try:
            prompt = self.render([asked], (), True)
            whole = self.render([asked, {"role": "assistant", "content": "Yes."}], (), False)
        except TrainingError:
            return None
        return next((token for _, token in self._endings(whole[len(prompt) :])), None)

    def _endings(self, answer: str) -> list[tuple[int, str]]:
        """The special tokens that the text ends with, white space aside, in order: where each ends, and the token."""
        found: list[tuple[int, str]] = []
        at = len(answer.rstrip())
        while (token := next((each for each in self._special if answer.endswith(each, 0, at)), None)) is not None:
            found.append((at, token))
            at = len(answer[: at - len(token)].rstrip())
        return found[::-1]

    def _ids(self, text: str) -> tuple[int, ...]:
        """Special tokens are cut out first, as tokenizers do it, so that text which comes again is looked up."""
        if self._pieces is None:
            return self._encode(text)
        ids = tuple(identity for piece in self._pieces.split(text) if piece for identity in self._encode(piece))
        if not self._checked:
            self._checked = True
            if ids != (whole := self._encode(text)):
                self._pieces, ids = None, whole  # a tokenizer that looks beyond its special tokens
        return ids

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _count_unsaid(self, turn: RenderedMessage) -> None:
        if turn.wire.get("reasoning_content") and not self.traits.reasoning:
            self.unsaid["reasoning"] += 1
        if turn.wire.get("tool_calls") and turn.wire.get("content") and not self.traits.content:
            self.unsaid["text beside a call"] += 1
