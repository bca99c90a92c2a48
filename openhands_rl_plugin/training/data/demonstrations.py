"""Token ids of demonstrations, which no model sampled: rendered once with the model's own chat template.

Episodes of a policy have recorded ids and are never rendered again. What was imported, or recorded from a server that
gives no ids, has none, so they are made exactly as a server makes prompts. A turn whose prompt does not extend the one
before (a template that takes reasoning out of earlier turns) starts a new sequence; every answer is trained once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from openhands_rl_plugin.core.errors import TrainingError, describe
from openhands_rl_plugin.core.judgements import resolved, score_of
from openhands_rl_plugin.core.messages import SpokenMessage
from openhands_rl_plugin.core.templates import (
    RenderError,
    TemplateTokenizer,
    chat_text,
    single_call_turns,
    text_messages,
)
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
from openhands_rl_plugin.training.algorithms import samples_of
from openhands_rl_plugin.trajectories.exchange.foreign import STRATEGY, arguments_object, spoken_messages, wire_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WireMessages = Sequence[dict[str, Any]]

Render = Callable[[WireMessages, Sequence[JsonObject], bool], str]
"""Messages, tools, and whether the generation prompt follows -> text. Raises ``TrainingError`` when refused."""

_CALL, _NAME, _VALUE, _RESULT = "probe_call", "probe_name", "probe_value", "probe result"
_TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": _CALL,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {_NAME: {"type": "string", "description": "A name."}},
            "required": [_NAME],
        },
    },
}


class TemplateTraits(NamedTuple):
    """Features of a chat template.

    ``native``: results, tools, and calls with their arguments as one JSON object. ``parallel``: several calls in a
    turn. ``repeats``: two messages of one role in a row.
    """

    native: bool
    parallel: bool
    repeats: bool


class RenderedMessage(NamedTuple):
    """A message as the template takes it, and whether the policy is trained to say it."""

    wire: dict[str, Any]
    trained: bool


def traits_of(render: Render) -> TemplateTraits:
    """Found out by rendering short conversations."""
    asked = {"role": "user", "content": "Begin."}
    calls = [_probe_call(_CALL), _probe_call("probe_other")]
    both = [asked, {"role": "assistant", "content": "", "tool_calls": calls}]
    return TemplateTraits(
        native=prints_calls(render),
        parallel="probe_other" in (_tried(render, both, [_TOOL]) or ""),
        repeats=_tried(render, [asked, asked]) is not None,
    )


def turns_for(
    trajectory: Trajectory, traits: TemplateTraits, leaf: int | None = None, context: Collection[int] = ()
) -> tuple[list[RenderedMessage], tuple[JsonObject, ...]]:
    """A path (default: that to the head) in the form that a template takes, and its tools where it prints those.

    Answers of the nodes ``context`` are not trained. Raises ``TrainingError`` when a call has no such form.
    """
    path, native = trajectory.path(leaf), traits.native
    spoken: Sequence[Message] = [
        message.model_copy(update={"sampled": False}) if at in context else message
        for at, message in zip(path, spoken_messages(trajectory, path), strict=True)
    ]
    try:
        if not (native and traits.parallel):
            spoken = single_call_turns(spoken)
        if native:
            turns = [
                RenderedMessage({**wire_of(each), "content": each.content or ""}, _trained(each)) for each in spoken
            ]
        else:
            turns = list(_as_text(spoken, trajectory.tools))
    except RenderError as error:
        raise TrainingError(str(error)) from error
    return (turns if traits.repeats else _alternating(turns)), (trajectory.tools if native else ())


def _trained(message: Message) -> bool:
    """Malformed calls are context only: a template would write them as something that was not sampled."""
    well_formed = all(arguments_object(call.arguments) is not None for call in message.tool_calls)
    return isinstance(message, SpokenMessage) and message.sampled and well_formed


def _as_text(spoken: Sequence[Message], tools: Sequence[JsonObject]) -> Iterator[RenderedMessage]:
    written = list(text_messages(spoken, tools))
    added = len(written) - len(spoken)  # a system message with the tools, where there was none
    yield from (RenderedMessage(dict(wire), False) for wire in written[:added])
    for wire, message in zip(written[added:], spoken, strict=True):
        yield RenderedMessage(dict(wire), _trained(message))


def _alternating(turns: Sequence[RenderedMessage]) -> list[RenderedMessage]:
    """Messages of one role in a row as one message, which is trained only if all of them are."""
    out: list[RenderedMessage] = []
    for turn in turns:
        if out and out[-1].wire["role"] == turn.wire["role"] and "tool_calls" not in turn.wire:
            last = out[-1]
            content = "\n\n".join(filter(None, (last.wire["content"], turn.wire["content"])))
            out[-1] = RenderedMessage({**last.wire, "content": content}, last.trained and turn.trained)
        else:
            out.append(turn)
    return out


def prints_calls(render: Render) -> bool:
    """Whether calls, results and tools are printed, and the arguments as JSON instead of text within JSON."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Begin."},
        {"role": "assistant", "content": "", "tool_calls": [_probe_call(_CALL)]},
        {"role": "tool", "content": _RESULT, "tool_call_id": "call_1", "name": _CALL},
    ]
    text, plain = _tried(render, messages, [_TOOL]), _tried(render, messages[:1], [_TOOL])
    if text is None or plain is None or _CALL not in plain:
        return False
    called = text.replace(plain, "", 1)
    printed = all(part in called for part in (_CALL, _NAME, _VALUE, _RESULT))
    return printed and f'\\"{_NAME}' not in called and f"'{_NAME}'" not in called


def _probe_call(name: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": {_NAME: _VALUE}}}


def _tried(render: Render, messages: WireMessages, tools: Sequence[JsonObject] = ()) -> str | None:
    try:
        return render(messages, tools, False)
    except TrainingError:
        return None


class ChatTokenizer(TemplateTokenizer, Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    @property
    def special_tokens_map(self) -> Mapping[str, Any]:
        """``eos_token`` and others by name."""
        ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Id -> added token, which says whether it is special."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text."""
        ...


def load_tokenizer(model: str) -> PreTrainedTokenizerFast:
    """The tokenizer in a model's directory. Raises ``TrainingError``."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise TrainingError(f"cannot load the tokenizer in {model}: {describe(error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise TrainingError(f"{model}: it has no fast tokenizer (tokenizer.json), which is needed")
    return tokenizer


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


def tokenised(
    trajectories: Sequence[Trajectory], tokenizer: ChatTokenizer
) -> tuple[tuple[Trajectory, ...], Counter[str]]:
    """All of them, in order, demonstrations with token ids; and why others stay without -> how many."""
    maker, out, failed = TokenMaker(tokenizer), list[Trajectory](), Counter[str]()
    for trajectory in trajectories:
        try:
            out.append(maker.with_tokens(trajectory) if is_demonstration(trajectory) else trajectory)
        except TrainingError as error:
            out.append(trajectory)
            failed[str(error)] += 1
    return tuple(out), failed


def demonstration_samples(trajectory: Trajectory, tokenizer: ChatTokenizer) -> list[Sample]:
    """The sequences of one demonstration; the mask covers the answers, each with its end-of-turn token.

    Raises ``TrainingError`` when the template refuses the conversation or names no end of a turn.
    """
    return samples_of(TokenMaker(tokenizer).with_tokens(trajectory), need_logprobs=False)


class TokenMaker:
    """Token ids by one tokenizer."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        special = {str(each) for each in tokenizer.added_tokens_decoder.values() if each.special}
        self._eos = str(tokenizer.special_tokens_map.get("eos_token") or "")
        self._special = tuple(sorted(special | ({self._eos} - {""})))

    @cached_property
    def traits(self) -> TemplateTraits:
        """The features of this template."""
        return traits_of(self.render)

    def render(self, messages: WireMessages, tools: Sequence[JsonObject], cue: bool) -> str:
        """The conversation as text. Raises ``TrainingError`` when the template refuses it."""
        try:
            return chat_text(self._tokenizer, messages, tools, cue=cue)
        except RenderError as error:
            raise TrainingError(f"the chat template refuses the conversation: {error}") from error

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
                prompt, answer = self._prompt_and_answer([each.wire for each in turns[: at + 1]], tools)
                extends = bool(held) and prompt.startswith(held)
                new = prompt[len(held) :] if extends else prompt
                tokens = Tokens.of(self.ids(new), self.ids(answer), extends=extends)
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
        """The prompt, and the completion to train, up to the token that ends the turn."""
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
        end, _ = next((each for each in endings if each[1] == self._eos), endings[-1])
        return prompt, answer[:end]

    def _endings(self, answer: str) -> list[tuple[int, str]]:
        """The special tokens that the text ends with, white space aside, in order: where each ends, and the token."""
        found: list[tuple[int, str]] = []
        at = len(answer.rstrip())
        while (token := next((each for each in self._special if answer.endswith(each, 0, at)), None)) is not None:
            found.append((at, token))
            at = len(answer[: at - len(token)].rstrip())
        return found[::-1]

    def ids(self, text: str) -> tuple[int, ...]:
        """The token ids of a text."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))
