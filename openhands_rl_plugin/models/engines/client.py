"""The client of model servers: requests and the errors of their answers, the models that they list, and the engine
for any OpenAI-compatible endpoint (vLLM, SGLang, ``openhands-rl serve``, hosted models)."""

from __future__ import annotations

import asyncio
import atexit
import re
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

import aiohttp
from pydantic import BaseModel, ConfigDict, ValidationError
from yarl import URL

from openhands_rl_plugin.core.concurrency import Backoff, background
from openhands_rl_plugin.core.errors import ConfigError, EpisodeError, InfrastructureError, ModelError
from openhands_rl_plugin.core.messages import (
    NEUTRAL_PARAMETERS,
    error_in,
    reasoning_in,
    recorded_parameters,
    sampling_in,
)
from openhands_rl_plugin.core.protocols import LLMEngine
from openhands_rl_plugin.core.records import MISSING
from openhands_rl_plugin.core.secrets import SHORTEST_OWN
from openhands_rl_plugin.core.servers import sendable_key
from openhands_rl_plugin.core.types import Completion, JsonObject, Message, PolicyRef, SamplingParams
from openhands_rl_plugin.models.engines.openai_wire import (
    LOGPROBS,
    TOKEN_IDS,
    ChatAnswer,
    Json,
    Unrecordable,
    chat_answer,
    dump_object,
    parse_object,
    reading,
    request_body,
)

Response = aiohttp.ClientResponse

# Temporary errors: a timeout, a conflict, a request sent too early, too many requests.
_WORTH_A_RETRY = frozenset({408, 409, 425, 429})
_PAUSES = Backoff(0.5, 20.0)
# Seconds that a server may ask to wait (Retry-After).
_LONGEST_PAUSE = 60.0
_READ_BYTES, _LONGEST_HEAD = 2**20, 100 * 1024
_CONNECT_SECONDS, _IDLE_SECONDS = 10.0, 4.0  # uvicorn, and so vLLM, closes an idle one after five
_LONGEST_MESSAGE = 2000

EXTENSIONS: JsonObject = {TOKEN_IDS: True, LOGPROBS: True, **NEUTRAL_PARAMETERS}
"""What is sent beyond OpenAI's protocol, as vLLM, SGLang and ``serve`` accept it. Hosted APIs may refuse it."""
_REFUSABLE = (*EXTENSIONS, "stream_options")


class Upstream(Protocol):
    """A source of answers. ``extensions``: the fields that may be added to a request."""

    extensions: JsonObject

    async def send(self, body: Json) -> bytes:
        """The body of the answer. Raises ``ServerError``."""
        ...


class Attempts:
    """The attempts at one request.

    A request that the server refuses because of the ``extensions`` is sent once more without them. ``failures`` counts
    the other failed attempts. ``log`` has the model, the parameters, the latency in seconds and the error of each
    attempt of ``ask``; ``sent`` is its last request.
    """

    def __init__(self, server: Upstream, *, extended: bool = True, tries: int = 1) -> None:
        self.extended = self._wanted = extended and bool(server.extensions)
        self.failures = 0
        self.log: list[JsonObject] = []
        self.sent: Json = {}
        self._server, self._tries, self._refusal = server, tries, ""

    async def ask(self, request: Json) -> ChatAnswer:
        """The answer to a chat request.

        Raises ``InfrastructureError`` or ``ModelError`` after the last attempt, with the ``ServerError`` as the cause.
        """
        try:
            return await self.answered(partial(self._attempt, request))
        except ServerError as error:
            raise error.as_failure(self.failures) from error

    async def _attempt(self, request: Json) -> ChatAnswer:
        self.sent = {**self._server.extensions, **request} if self.extended else request
        attempt: JsonObject = {"model": self.sent["model"], "parameters": recorded_parameters(self.sent), "error": None}
        started = time.perf_counter()
        try:
            return _read(await self._server.send(self.sent))
        except ServerError as error:
            attempt["error"] = str(error)
            raise
        finally:
            self.log.append({**attempt, "latency": time.perf_counter() - started})

    async def answered[T](self, send: Callable[[], Awaitable[T]]) -> T:
        """The result of ``send``, which sends the request with the extensions where they are ``extended``. It is called
        again after a refusal, and after a pause where its error is temporary. Raises ``ServerError``."""
        while True:
            try:
                return await send()
            except ServerError as error:
                if not await self._goes_on(error):
                    raise

    async def _goes_on(self, error: ServerError) -> bool:
        text = error.body.decode("utf-8", "replace").lower()
        named = next((name for name in _REFUSABLE if name in text), None) if error.status in (400, 422) else None
        if self.extended and named:
            self.extended, self._refusal = False, f"the model server refuses {named} with status {error.status}"
            return True
        self.failures += 1
        if not error.is_temporary or error.status == 200 or self.failures >= self._tries:
            return False
        await asyncio.sleep(max(_PAUSES.pause(self.failures), min(error.retry_after, _LONGEST_PAUSE)))
        return True

    def why_missing(self, name: str) -> str:
        """Why an answer came without what the extension ``name`` asks for."""
        return self._refusal or f"the model server ignores {name}"

    def note_missing(self, completion: Completion) -> None:
        """Name in the metadata what training needs and the answer of ``ask`` lacks, where the request asked for it."""
        if self._wanted and all(self.sent.get(name, True) for name in (TOKEN_IDS, LOGPROBS)):
            note_missing(completion, self.why_missing)


def note_missing(completion: Completion, why: Callable[[str], str]) -> JsonObject:
    """Name in the metadata what training needs and the completion lacks, each with its cause: ``why`` of an extension.
    Returns it."""
    missing: JsonObject = {}
    if (tokens := completion.tokens) is None:
        missing = {"token_ids": why(TOKEN_IDS)}
    elif tokens.sampled_ids and not tokens.logprobs:
        missing = {"logprobs": why(LOGPROBS)}
    if missing:
        completion.metadata[MISSING] = missing
    return missing


def _read(body: bytes) -> ChatAnswer:
    try:
        return reading("the response", chat_answer, body)
    except Unrecordable as problem:
        document = parse_object(body)
        if document is not None and not document.get("choices"):
            raise ServerError(200, "the server answered without a choice", body) from problem
        shown = " ".join(body[:200].decode("utf-8", "replace").split())
        raise ServerError(500, f"{problem} (check base_url): {shown}", body) from problem


class ServerError(Exception):
    """The server answered an error, or not at all: ``status`` is that of HTTP, 408 where it was too slow, and 500 where
    there is no connection. ``body`` and ``headers`` are what it sent, ``headers`` ``None`` for nothing. With a status
    of 200 the answer had no choice."""

    def __init__(self, status: int, message: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.body, self.headers = status, body or message.encode(), headers

    @property
    def is_temporary(self) -> bool:
        """Whether the same request may succeed later."""
        return not 400 <= self.status < 500 or self.status in _WORTH_A_RETRY

    @property
    def retry_after(self) -> float:
        """The seconds that the server asks to wait, or 0."""
        waits = (self.headers or {}).get("retry-after", "")
        return float(waits) if waits.isascii() and waits.isdecimal() else 0.0  # a date is rare

    def as_failure(self, attempts: int) -> EpisodeError:
        """``ModelError`` when the server refuses the request itself, else ``InfrastructureError``."""
        tried = f" (after {attempts} attempts)" if attempts > 1 else ""
        return (InfrastructureError if self.is_temporary else ModelError)(f"{self}{tried}")


def server_error(caught: BaseException) -> ServerError | None:
    """The model server's error that was the cause."""
    error: BaseException | None = caught
    while error is not None and not isinstance(error, ServerError):
        error = error.__cause__
    return error


_JSON = {"content-type": "application/json"}
Connections = dict[tuple[asyncio.AbstractEventLoop, str], aiohttp.ClientSession]
"""Open ones by event loop and scheme."""
_SHARED: Connections = {}


def _connected(connections: Connections, scheme: str) -> aiohttp.ClientSession:
    """The session of this event loop. It adds no header, follows no redirect and keeps no cookie."""
    at = (asyncio.get_running_loop(), scheme)
    if (known := connections.get(at)) is None:
        known = connections[at] = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("accept", "accept-encoding", "user-agent"),
            max_field_size=_LONGEST_HEAD,
            read_bufsize=_READ_BYTES,
            trust_env=scheme == "https",  # a plain HTTP server is local, and asked without a proxy
        )
    return known


async def close_connections(connections: Connections = _SHARED) -> None:
    """Close those of this event loop."""
    for at in [each for each in connections if each[0] is asyncio.get_running_loop()]:
        await connections.pop(at).close()


@atexit.register
def _close_all() -> None:
    for (loop, _), client in _SHARED.items():
        if loop.is_running():
            asyncio.run_coroutine_threadsafe(client.close(), loop).result(1.0)


class HttpUpstream:
    """A server with an API like OpenAI's. ``timeout``: seconds of a request, from the connection to the last byte.

    ``headers`` go with every chat request; a key among them replaces ``key``. ``connections``: by default those of all
    such servers of the process.
    """

    extensions: JsonObject = EXTENSIONS

    def __init__(
        self,
        base_url: str,
        key: str | None,
        timeout: float,
        *,
        headers: Mapping[str, str] | None = None,
        connections: Connections = _SHARED,
    ) -> None:
        self._base, self._key, self._timeout = base_url.rstrip("/"), key or "", timeout
        self._headers = {name.lower(): value for name, value in (headers or {}).items()} | _JSON
        self._connections = connections
        url = urlsplit(base_url)
        self._scheme = url.scheme
        # Anthropic takes a bearer token for another kind of key; vLLM and others know no other header.
        self._anthropic = (url.hostname or "").endswith("anthropic.com")

    async def send(self, body: Json) -> bytes:
        """The body of the answer to a chat completion's request. Raises ``ServerError``, also for an error in it."""
        async with self.open("POST", "chat/completions", self._headers, dump_object(body)) as response:
            answer = await response.read()
        found = error_in(parse_object(answer)) if b'"error"' in answer or b'"choices"' not in answer else None
        if found is not None:
            raise self._error(found[0], answer, response.headers)
        return answer

    async def ask(self, path: str, body: Mapping[str, object] | None = None) -> bytes:
        """The body of an answer; ``GET`` without a body. Raises ``ServerError``."""
        method, content = ("GET", b"") if body is None else ("POST", dump_object(body))
        async with self.open(method, path, _JSON, content) as response:
            return await response.read()

    @asynccontextmanager
    async def open(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> AsyncIterator[Response]:
        """An open response; ``path`` is below ``/v1``. Raises ``ServerError``, also in the
        block."""
        sent = {**headers}
        if self._key and not self._anthropic:
            sent.setdefault("authorization", f"Bearer {self._key}")
        if self._key and (self._anthropic or path.startswith("messages")):
            sent.setdefault("x-api-key", self._key)
        server, client = f"model server at {self._base}", _connected(self._connections, self._scheme)
        url = URL(f"{self._base}/{path}", encoded=True)
        try:
            async with (
                asyncio.timeout(self._timeout),
                client.request(method, url, data=body or None, headers=sent, allow_redirects=False) as response,
            ):
                if response.status >= 300:
                    raise self._error(response.status, await response.read(), response.headers)
                yield response
        except TimeoutError as error:
            problem = f"Request timed out: the {server} did not answer within {self._timeout:g} s."
            raise ServerError(408, problem) from error
        except (aiohttp.ClientError, OSError) as error:
            problem = f"the {server} broke off; ask again."
            if isinstance(error, aiohttp.ClientConnectorError):
                remedy = "start it, for example with `openhands-rl serve`, or set another base_url."
                problem = f"no model server answers at {self._base} ({error!s:.100}): {remedy}"
            raise ServerError(500, f"Connection error: {problem}") from error

    def _error(self, status: int, answer: bytes, headers: Mapping[str, str]) -> ServerError:
        """That of an answer with this body, without the key."""
        if len(self._key) >= SHORTEST_OWN:
            answer = answer.replace(self._key.encode(), b"***")  # some servers repeat it
        if status < 400:  # a client that followed it would leave with its messages
            place = headers.get("location", "").partition("://")[2].partition("?")[0].partition("/")[0]
            other, where = place.rpartition("@")[2][:200] or "another path", "set --upstream or base_url"
            return ServerError(421, f"The model server at {self._base} redirects to {other!a}: {where}.")
        shown = parse_object(answer) or answer[:_LONGEST_MESSAGE].decode("utf-8", "replace")
        return ServerError(status, f"Error code: {status} - {shown}"[:_LONGEST_MESSAGE], answer, headers)


class ServerEvent(NamedTuple):
    """One event: all of its bytes, up to and including the empty line, and its data, empty for a comment."""

    raw: bytes
    data: bytes


# Only line feeds end lines: JSON text may contain other characters that ``splitlines`` would split at.
_EVENT_END = re.compile(rb"(?<=\n\n)|(?<=\n\r\n)")
_DATA = re.compile(rb"(?m)^data: ?([^\r\n]*)")


async def events(response: Response) -> AsyncIterator[ServerEvent]:
    """The events of a stream, wherever the network cuts it; bytes after the last empty line have no data."""
    rest = b""
    async for received in response.content.iter_any():
        *complete, rest = _EVENT_END.split(rest + received)
        for raw in complete:
            yield ServerEvent(raw, b"\n".join(_DATA.findall(raw)))
    yield ServerEvent(rest, b"")


class ListedModel(BaseModel):
    """One entry of ``/v1/models``; ``max_model_len`` is the context in tokens, where the server says it.

    An adapter has its base model as ``parent``, and vLLM's ``root`` is the path that a model was loaded from.
    """

    model_config = ConfigDict(extra="ignore")

    id: str
    root: str | None = None
    parent: str | None = None
    owned_by: str | None = None
    max_model_len: int | None = None

    @property
    def weights(self) -> Path | None:
        """The directory of its weights, where that is on this machine."""
        return local_weights(self.root or "")


class ListedModels(BaseModel):
    """The answer of ``/v1/models``."""

    data: list[ListedModel]

    @property
    def bases(self) -> list[ListedModel]:
        """Those that are no adapters."""
        return [model for model in self.data if model.parent is None]


def with_version(url: str) -> str:
    """The URL with ``/v1``, where it has no path of its own."""
    return url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1"


def served_base(base_url: str, wanted: str, api_key: str | None, timeout: float) -> ListedModel:
    """The base model in ``GET {base_url}/models``; ``wanted`` chooses one by name, empty takes the only one.

    Raises ``ConfigError`` when the base model is ambiguous, ``InfrastructureError`` when the server does not answer.
    """
    bases = ListedModels(data=listed_models(base_url, api_key, timeout) or []).bases
    if wanted and not bases:  # it may serve what it does not list
        return ListedModel(id=wanted)
    found = [each for each in bases if wanted in ("", each.id)]
    if len(found) != 1:
        names = ", ".join(each.id for each in bases) or "none"
        raise ConfigError(f"{base_url} has the base models {names:.500}: name one of them in [rl.serving] model")
    return found[0]


def local_weights(path: str | Path) -> Path | None:
    """``path`` when it is a model's directory on this machine."""
    directory = Path(path).expanduser()
    return directory.resolve() if path and (directory / "config.json").is_file() else None


def listed_models(base_url: str, api_key: str | None, timeout: float = 10.0) -> list[ListedModel] | None:
    """The served models, or ``None`` when the server has no such list.

    Raises ``InfrastructureError`` when the server does not answer, ``ConfigError`` for a wrong URL or key.
    """
    try:
        if urlsplit(base_url).scheme not in ("http", "https"):
            raise ValueError("it has to begin with http:// or https://")
        answer = background().wait_for(HttpUpstream(base_url, api_key, timeout).ask("models"))
        return ListedModels.model_validate_json(answer).data
    except ValidationError:
        return None
    except ValueError as error:
        raise ConfigError(f"base_url {base_url!r:.100} is not a URL: {error}") from error
    except ServerError as error:
        if error.status == 401:
            raise ConfigError(f"{base_url} refuses the API key: see [rl.serving] api_key_env, [llm] api_key") from error
        if error.headers is not None:  # it answers, and may serve what it does not list
            return None
        # The first words are those of OpenAI's client, for litellm.
        raise InfrastructureError(str(error).removeprefix("Connection error: ")) from error


def check_model_server(base_url: str, model: str, api_key: str | None = None) -> None:
    """Raise as ``listed_models``, and ``ConfigError`` for a server that does not serve ``model``.

    A server may serve what it does not list: only a refused request for one token says that it does not.
    """
    served = [each.id for each in listed_models(base_url, api_key) or ()]
    if not served or model in served:
        return
    body = {"model": model, "messages": [{"role": "user", "content": "."}], "max_tokens": 1}
    try:
        background().wait_for(HttpUpstream(base_url, api_key, 60.0).send(body))
    except ServerError as error:
        if not error.is_temporary:  # what else is wrong shows in the episodes
            raise ConfigError(f"{base_url} does not serve {model}. It has: {', '.join(served):.500}") from error


# Larger than any ``n`` of one call, whose seeds are consecutive; a prime, so that repeated calls do not line up.
_SEED_STEP = 1_000_003
# OpenAI-compatible servers accept at least 31 bits.
_SEEDS = 2**31


def merge_sampling(given: SamplingParams | None, default: SamplingParams) -> SamplingParams:
    """``given``, with every unset parameter taken from ``default``."""
    known = {name: value for name, value in given or () if value not in (None, ())}
    return default.model_copy(update=known)


class ConversationSeeds:
    """Numbers for the seeds of an episode's calls.

    A number follows from the conversation that an answer is sampled to, and from how many calls there were about it. So
    an episode can be sampled again whatever runs at the same time, and whichever of its own branches is answered first.
    The first call's is 0, so that a request's seed is the one that its first answer is sampled with.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._calls: Counter[int] = Counter()

    def next(self, messages: Sequence[Message]) -> int:
        """The number of the next call about ``messages``."""
        digest = 0
        for message in messages:
            digest = zlib.crc32(f"{message.role}\0{message.content}\0".encode("utf-8", "surrogatepass"), digest)
            for call in message.tool_calls:
                digest = zlib.crc32(repr((call.name, call.arguments)).encode("utf-8", "surrogatepass"), digest)
        self._first = digest if self._first is None else self._first
        times = self._calls[digest]
        self._calls[digest] += 1
        return (digest ^ self._first) + times * _SEED_STEP


@dataclass(frozen=True)
class SeededEngine:
    """An engine for one episode: the run's sampling parameters, and a seed of its own for every call.

    A call's seed follows from the episode's (``episode_seed``, which a search combines with its own) and from
    ``ConversationSeeds``. Without a seed the server chooses.
    """

    engine: LLMEngine
    sampling: SamplingParams
    episode_seed: int | None
    _seeds: ConversationSeeds = field(default_factory=ConversationSeeds, init=False)

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Sample ``n`` completions. Raises ``InfrastructureError`` or ``ModelError``."""
        first = self.episode_seed
        seed = None if first is None else (first + self._seeds.next(messages)) % _SEEDS
        wanted = merge_sampling(sampling, self.sampling.model_copy(update={"seed": seed}))
        return await self.engine.complete(messages, tools=tools, n=n, sampling=wanted)


class OpenAIEngine:
    """``protocols.LLMEngine`` over ``POST {base_url}/chat/completions``.

    Args:
        model: the served name, for example ``policy-v000007``.
        base_url: up to and including ``/v1``.
        api_key: sent as a bearer token; never stored elsewhere, printed or logged.
        base_model: name of the base model of an adapter; ``model`` without an adapter.
        timeout: seconds for one request, from the connection to the last byte.
        retries: how often a request is retried when the server is unreachable, slow or overloaded.

    Close it with ``aclose``, on the event loop of its requests.
    """

    def __init__(
        self,
        model: str,
        base_url: str,
        api_key: str | None = None,
        base_model: str | None = None,
        timeout: float = 120.0,
        *,
        retries: int = 4,
    ) -> None:
        self.model, self.base_model = model, base_model or model
        self._tries = retries + 1
        self._connections: Connections = {}
        key = sendable_key(api_key or "", "api_key")
        self._server = HttpUpstream(base_url, key, timeout, connections=self._connections)

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Sample ``n`` completions. Parameters beyond temperature and ``top_p`` that nobody sets are sent with their
        neutral values (``core.messages.NEUTRAL_PARAMETERS``), unless the server refuses them.

        Raises ``InfrastructureError`` or ``ModelError``.
        """
        wanted = sampling or SamplingParams()

        async def one(at: int) -> Completion:
            own = wanted if wanted.seed is None else wanted.model_copy(update={"seed": wanted.seed + at})
            return await self._completion(request_body(self.model, messages, tools=tools, sampling=own))

        # One request for each, as some servers ignore ``n`` or refuse it.
        made = await asyncio.gather(*map(one, range(n)), return_exceptions=True)
        if failed := next((each for each in made if isinstance(each, BaseException)), None):
            raise failed  # when none is on its way any more
        return [each for each in made if isinstance(each, Completion)]

    async def aclose(self) -> None:
        """Close the connections."""
        await close_connections(self._connections)

    async def _completion(self, body: JsonObject) -> Completion:
        asking = Attempts(self._server, tries=self._tries)
        answer = await asking.ask(body)
        policy = PolicyRef.from_served_name(self.base_model, answer.model)
        if policy.adapter is None:
            policy = PolicyRef.from_served_name(self.base_model, self.model)
        about: JsonObject = {"attempts": len(asking.log)}
        if thought := reasoning_in(answer.choices[0].extra):
            about["reasoning_content"] = thought
        made = answer.completion(policy, sampling_in(asking.sent), about)
        asking.note_missing(made)
        message = made.message
        if message.tool_calls and message.content is not None:
            # Templates insert white space between text and calls; it cannot be distinguished from that of the model.
            message = message.model_copy(update={"content": message.content.strip() or None})
        return made.model_copy(update={"message": message})
