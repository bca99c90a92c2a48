"""What both hosts read out of litellm's calls, and the turns and completions that they know.

litellm parses, validates, copies and logs the whole response, and 35,000 prompt ids cost it several milliseconds a
call. So ``TokenInterceptor`` removes them from the body of the model server's response. litellm and OpenHands get the
response that they would get without a request for ids.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx
import litellm
from litellm.types.utils import Choices, ModelResponse
from openai import OpenAI

from openhands_rl_plugin.core.concurrency import bound
from openhands_rl_plugin.core.errors import EpisodeError, InfrastructureError, ModelError, describe
from openhands_rl_plugin.core.messages import error_in, text_in, usage_in, whole_message
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Completion, Message, Tokens, ToolCall, Usage
from openhands_rl_plugin.hosts.shared.episode import HostEpisode
from openhands_rl_plugin.models.engines.extensions import (
    LOGPROBS,
    SAMPLING,
    TOKEN_IDS,
    ExtensionTable,
    extension_values,
)
from openhands_rl_plugin.models.gateway.requests import Unrecordable
from openhands_rl_plugin.models.gateway.responses import UpstreamResponse
from openhands_rl_plugin.models.gateway.token_id_text import ContextCache, parse_object

# Temporary errors: a timeout, a conflict, a request sent too early, too many requests.
_WORTH_A_RETRY = frozenset({408, 409, 425, 429})


def model_server_error(error: Exception) -> EpisodeError:
    """``ModelError`` when the server refuses the request itself (4xx), else ``InfrastructureError``."""
    status = getattr(error, "status_code", None)
    refused = isinstance(status, int) and 400 <= status < 500 and status not in _WORTH_A_RETRY
    return (ModelError if refused else InfrastructureError)(describe(error))


# Model servers of one process. A client that is dropped from the cache costs only a new connection.
_CLIENTS = 16


class TokenInterceptor:
    """``tokens`` of the first choice of the first response, and ``rest``, the body that litellm receives.

    Both are ``None`` when no response was intercepted. ``after``: see ``ContextCache.tokens``.
    """

    def __init__(self, contexts: ContextCache, after: Tokens | None = None) -> None:
        self._contexts = contexts
        self._after = after
        self.tokens: Tokens | None = None
        self.rest: bytes | None = None

    def take(self, body: bytes) -> bytes:
        """The body for litellm, unchanged unless it has prompt ids and sampled ids."""
        try:
            answer = UpstreamResponse(body)
        except Unrecordable:
            return body
        choice = answer.choices[0]
        if choice.prompt is None:
            return body
        tokens = self._contexts.tokens(choice.prompt, choice.sampled, choice.logprobs, self._after)
        if tokens is None:
            return body
        self.tokens, self.rest = tokens, answer.plain_body()
        return self.rest


_INTERCEPTOR: ContextVar[TokenInterceptor | None] = ContextVar("rl_token_interceptor", default=None)


def intercepting(contexts: ContextCache, after: Tokens | None = None) -> AbstractContextManager[TokenInterceptor]:
    """Responses that come through ``intercepting_client`` in this context pass the interceptor."""
    return bound(_INTERCEPTOR, TokenInterceptor(contexts, after))


def intercepting_client(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The ``client`` argument for litellm; empty where litellm needs its own client: for TLS, and without a key."""
    base_url, key = asked.get("base_url") or asked.get("api_base") or "", asked.get("api_key")
    plain = base_url.startswith("http://") and not (asked.get("client") or asked.get("stream"))
    return {"client": _client(base_url, key)} if plain and isinstance(key, str) and key else {}


@lru_cache(_CLIENTS)
def _client(base_url: str, key: str) -> OpenAI:
    # litellm sets the organisation and the number of retries, and gives the time limit with each call.
    return OpenAI(base_url=base_url, api_key=key, http_client=_connections())


@cache
def _connections() -> httpx.Client:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    return httpx.Client(follow_redirects=True, limits=limits, event_hooks={"response": [_intercept]})


def _intercept(response: httpx.Response) -> None:
    response.stream = _WholeBody(response)


class _WholeBody(httpx.SyncByteStream):
    """The whole body for litellm, with the status that an error in it stands for, through the interceptor.

    Raises ``httpx.ReadTimeout`` when all of it takes longer than one read may take.
    """

    def __init__(self, response: httpx.Response) -> None:
        assert isinstance(response.stream, httpx.SyncByteStream)
        self._response, self._stream, self._interceptor = response, response.stream, _INTERCEPTOR.get()

    def __iter__(self) -> Iterator[bytes]:
        answer, parts = self._response, list[bytes]()
        seconds = answer.request.extensions.get("timeout", {}).get("read") or math.inf
        deadline = time.monotonic() + seconds
        for part in self._stream:
            if time.monotonic() > deadline:
                raise httpx.ReadTimeout(f"the answer is not whole after {seconds:g} s", request=answer.request)
            parts.append(part)
        body, headers = b"".join(parts), answer.headers
        is_json = headers.get("content-type", "").startswith("application/json")
        if is_json and answer.status_code == 200 and "content-encoding" not in headers:
            if b'"error"' in body and (error := error_in(parse_object(body))) is not None:
                answer.status_code = error[0]
            body = body if self._interceptor is None else self._interceptor.take(body)
        yield body

    def close(self) -> None:
        """Close the connection, or give it back."""
        self._stream.close()


OPENAI_COMPATIBLE = frozenset({"openai", "custom_openai", "hosted_vllm", "litellm_proxy"})

_FIELDS = (TOKEN_IDS, LOGPROBS, SAMPLING)


@lru_cache(16)
def extensions_of(base_url: str) -> ExtensionTable:
    """What the models of one server accept; shared by all agents of the process."""
    return ExtensionTable()


def wanted_fields(given: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields to ask a server for, except for those that the user set: his own values take precedence."""
    own = {**(given.get("extra_body") or {}), **given}
    return tuple(name for name in _FIELDS if name not in own) if _knows_token_ids(given) else ()


def asks_for_tokens(given: Mapping[str, Any]) -> bool:
    """Whether token ids and logprobs are asked for, by us or in the call: what a user turned off is not missing."""
    own = {**(given.get("extra_body") or {}), **given}
    return _knows_token_ids(given) and all(own.get(name, True) for name in (TOKEN_IDS, LOGPROBS))


def token_request(given: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """The parameters of litellm that request token ids, logprobs and neutral sampling."""
    own = given.get("extra_body") or {}
    values = extension_values(fields, {**own, **given})
    added: dict[str, Any] = {LOGPROBS: values.pop(LOGPROBS)} if LOGPROBS in values else {}
    return {**added, "extra_body": {**values, **own}} if values else added


def base_url_of(given: Mapping[str, Any]) -> str:
    """The server of a call; empty for a provider's own."""
    return str(given.get("base_url") or given.get("api_base") or "")


def _knows_token_ids(asked: Mapping[str, Any]) -> bool:
    """Whether the server may be self-hosted: OpenAI and other vendors reject the unknown parameter."""
    base_url = base_url_of(asked)
    if not base_url or (urlsplit(base_url).hostname or "").endswith("openai.com"):
        return False
    provider = asked.get("custom_llm_provider") or split_provider(asked.get("model") or "")[0]
    return provider in OPENAI_COMPATIBLE


def missing_keys(model: str) -> list[str]:
    """The environment variables of keys that a vendor's model needs and this process has not."""
    asked = litellm.validate_environment(model=model)["missing_keys"]
    # AWS has roles and profiles, too; what is no key has a default.
    return [name for name in asked if name.endswith("_KEY") and not name.startswith("AWS_")]


def split_provider(model: str) -> tuple[str, str]:
    """``"openai/Qwen/Qwen3-8B"`` -> ``("openai", "Qwen/Qwen3-8B")``; the provider is empty when unknown."""
    provider, slash, name = model.partition("/")
    return (provider, name) if slash and provider in litellm.provider_list else ("", model)


def take_message(choice: Choices) -> Message:
    """The message. Lone surrogates and arguments that are absent are replaced in the choice, too: OpenHands could
    neither send them again nor read them."""
    message = choice.message
    calls = message.tool_calls or ()
    said = Message(
        role="assistant",
        content=text_in({"content": message.content}, calls),
        tool_calls=tuple(
            ToolCall(id=call.id or "", name=call.function.name or "", arguments=call.function.arguments)
            for call in calls
        ),
    )
    whole = whole_message(said)
    if whole is not said or whole.content is None:
        message.content = whole.content
    for call, own in zip(calls, whole.tool_calls, strict=True):
        if (call.id, call.function.name, call.function.arguments) != (own.id, own.name, own.arguments):
            call.id, call.function.name, call.function.arguments = own.id, own.name, own.arguments
    return whole


def take_tokens(prompt_ids: object, choice: Choices) -> Tokens | None:
    """Move the token arrays out of the choice; ``None`` without both kinds of ids."""
    logprobs, choice.logprobs = getattr(choice, "logprobs", None), None
    sampled_ids = (getattr(choice, "provider_specific_fields", None) or {}).pop("token_ids", None)
    if not (isinstance(prompt_ids, list) and isinstance(sampled_ids, list)):
        return None
    content = getattr(logprobs, "content", None) or ()
    values = tuple(float(entry.logprob) for entry in content)
    # Not validated here: 35,000 ids in every turn would cost most of a millisecond. ``HostEpisode`` checks the ids that
    # each prompt adds before they are stored.
    return Tokens.model_construct(
        prompt_ids=tuple(prompt_ids),
        sampled_ids=tuple(sampled_ids),
        logprobs=Tokens.known_logprobs(values, len(sampled_ids)),
    )


def usage_of(response: ModelResponse) -> Usage:
    """Tokens of one call."""
    usage = getattr(response, "usage", None)
    return usage_in(usage.model_dump() if usage is not None else None)


class RequestedTurn(Protocol):
    """A request that a host would send; ``path`` is its conversation in the tree."""

    @property
    def path(self) -> tuple[Message, ...]: ...


class KnownTurns[T: RequestedTurn]:
    """The live turn, and those that forks of it have reached."""

    def __init__(self) -> None:
        self._turns: dict[tuple[Message, ...], T] = {}

    def open(self, turn: T) -> None:
        """Begin a turn; others are forgotten unless their conversations go on from it."""
        start = len(turn.path)
        self._turns = {path: known for path, known in self._turns.items() if path[:start] == turn.path}
        self.expect(turn)

    def expect(self, turn: T) -> None:
        """Until the next turn is opened, conversations that begin with ``turn.path`` go on from ``turn``."""
        self._turns[turn.path] = turn

    def longest(self, messages: Sequence[Message]) -> T | None:
        """The turn with the longest path that ``messages`` begin with, if there is one."""
        said = tuple(messages)
        lengths = {len(path) for path in self._turns}
        prefixes = (said[:length] for length in sorted(lengths, reverse=True) if length <= len(said))
        return next((self._turns[prefix] for prefix in prefixes if prefix in self._turns), None)


def sampled_below_head(tree: EpisodeTree) -> Iterator[Message]:
    """The answers that can still be executed."""
    pending = list(tree.children(tree.head))
    while pending:
        index = pending.pop()
        pending += tree.children(index)
        if tree.nodes[index].sampled:
            yield tree.nodes[index].message


class TurnAnswers[T: RequestedTurn, A]:
    """The live turn and those that forks have reached; an ``A`` for each answer that can still be executed."""

    def __init__(self, episode: HostEpisode) -> None:
        self._episode = episode
        self._turns = KnownTurns[T]()
        self._of: dict[Message, A] = {}

    def open(self, turn: T) -> None:
        """Begin a turn. Earlier turns and answers are dropped, unless search can still reach them."""
        self._turns.open(turn)
        reachable = set(sampled_below_head(self._episode.tree))
        self._of = {answer: made for answer, made in self._of.items() if answer in reachable}

    def expect(self, turn: T) -> None:
        """Until the next turn is opened, conversations that begin with ``turn.path`` go on from ``turn``."""
        self._turns.expect(turn)

    def turn(self, messages: Sequence[Message]) -> T | None:
        """The turn that a conversation goes on from, if it is known."""
        return self._turns.longest(messages)

    def keep(self, answer: Message, made: A) -> None:
        """Remember what the host made of an answer of this turn. Safe from any thread."""
        self._of[answer] = made

    def of(self, answer: Message) -> A:
        """What the host made of an answer. Raises ``KeyError`` for one that cannot be executed any more."""
        return self._of[answer]

    async def gather(self, calls: Iterable[Awaitable[Completion]]) -> list[Completion]:
        """The completions of the calls that did not fail; meanwhile the episode so far is stored.

        Raises ``StorageError``, and the first call's error when all failed.
        """
        kept, *answers = await asyncio.gather(self._episode.keep_up(), *calls, return_exceptions=True)
        completions = [answer for answer in answers if isinstance(answer, Completion)]
        for error in (kept, *answers):
            if isinstance(error, BaseException) and not (completions and isinstance(error, EpisodeError)):
                raise error
        return completions
