"""One episode of a host. ``Session`` samples, searches, records and stores its completions.

``Upstream`` is the model server, ``BranchWorld`` a fork of the host for search. A runner binds a session for the next
agent that it creates; an agent without one creates its own. Nothing here imports OpenHands.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar, copy_context
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from openhands_rl_plugin.config.build import make_engine
from openhands_rl_plugin.config.rl import AUTO, RLSettings
from openhands_rl_plugin.core.concurrency import Job, background, on_loop
from openhands_rl_plugin.core.errors import (
    BadEnvironmentError,
    CaughtFailure,
    EpisodeError,
    ModelError,
    RLError,
    boundary,
)
from openhands_rl_plugin.core.messages import (
    NEUTRAL_PARAMETERS,
    WireMessage,
    altering_parameters,
    equals,
    is_json_object,
    reasoning_in,
    sampling_in,
    text_of,
    to_message,
    to_wire,
    usage_to_wire,
    wire_calls,
)
from openhands_rl_plugin.core.protocols import EnvInfo, Forkable, LLMEngine, Strategy
from openhands_rl_plugin.core.records import PROMPT, CommandEvidence, WorkspaceCommand
from openhands_rl_plugin.core.templates import CALL, PARAMETER
from openhands_rl_plugin.core.tree import HostConversation
from openhands_rl_plugin.core.types import (
    Completion,
    EpisodeRequest,
    FailureKind,
    JsonObject,
    Limits,
    Message,
    Observation,
    PolicyRef,
    SamplingParams,
    Score,
    StopReason,
    StrategySpec,
    Task,
    ToolCall,
    Trajectory,
    Usage,
)
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.models.engines.client import (
    Attempts,
    ConversationSeeds,
    HttpUpstream,
    ServerError,
    Upstream,
    merge_sampling,
)
from openhands_rl_plugin.models.engines.openai_wire import PROMPT_IDS, SAMPLED_IDS, Json, dump_object
from openhands_rl_plugin.rollout.episode import Episode


class EngineUpstream:
    """An ``Upstream`` that samples from an ``LLMEngine`` on the loop of ``background``."""

    def __init__(self, engine: LLMEngine) -> None:
        self.extensions: JsonObject = {}
        self._engine = engine

    async def send(self, body: Json) -> bytes:
        """As ``Upstream.send``."""
        messages, tools = [to_message(message) for message in body["messages"]], body.get("tools") or ()
        try:
            [completion] = await self._engine.complete(messages, tools=tools, n=1, sampling=sampling_in(body))
        except EpisodeError as error:
            raise ServerError(400 if isinstance(error, ModelError) else 503, str(error)) from error
        message, tokens = to_wire(completion.message), completion.tokens
        if thought := reasoning_in(completion.metadata):
            message["reasoning_content"] = thought
        choice: dict[str, Any] = {"index": 0, "finish_reason": completion.finish_reason or "stop", "message": message}
        answer: dict[str, Any] = {
            "id": f"rl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "model": completion.policy.served_name if completion.policy else body["model"],
            "choices": [choice],
            "usage": usage_to_wire(completion.usage),
        }
        if tokens is not None:
            answer[PROMPT_IDS], choice[SAMPLED_IDS] = list(tokens.prompt_ids), list(tokens.sampled_ids)
            choice["logprobs"] = {"content": [{"token": "", "logprob": each} for each in tokens.logprobs]}
        return dump_object(answer)


_made: dict[str, LLMEngine] = {}
_lock = threading.Lock()


def upstream_in(settings: RLSettings, *, model: str, base_model: str) -> Upstream | None:
    """The upstream that replaces the host's own model server for the served name ``model``; ``None`` if there is none.

    Sessions of a process share engines. Raises ``ConfigError``.
    """
    serving, url = settings.serving, settings.serving.base_url
    if url and settings.engine in (AUTO, "openai") and not settings.engine_options:
        return HttpUpstream(url, serving.api_key(), serving.request_timeout)
    if settings.engine == AUTO:
        return None
    key = "\0".join((model, base_model, settings.engine, str(settings.engine_options), serving.model_dump_json()))
    with _lock:
        if key not in _made:
            _made[key] = make_engine(settings, model=model, base_model=base_model, base_url=url)
        return EngineUpstream(_made[key])


_OPEN, _STOP, _CLOSED = "<function=", "</function", "</function>"
"""The start of a call, the stop word that OpenHands sends, and the closing tag that its later prompts have."""


class SampledTexts:
    """The completions of one episode as the model sampled them. Hosts repeat them in another form.

    Why it is needed: with the host's form, the tokens of a turn are no prefix of the next prompt, so that each turn
    becomes a training sequence of its own. V1 repairs the arguments of API calls: it repeats ``"[1, 2]"`` as
    ``[1, 2]``. OpenHands parses calls in text and formats them again: it adds an empty line before a call, line breaks
    around values of several lines and the closing tag that a stop word cut, and strips white space. If the call is the
    same, this class sends the sampled text instead, and every prompt extends the one before.
    """

    def __init__(self) -> None:
        self._texts: dict[Message, str] = {}

    def add(self, completion: Completion) -> None:
        """Remember a completion without API calls; its text may hold a call."""
        answer, text = completion.message, completion.message.content
        if text and not answer.tool_calls:
            choice = cast(Any, completion.metadata["response"])["choices"][0]
            # Some servers report the stop word (SGLang: ``matched_stop``). For others an open call shows it.
            cut = choice.get("stop_reason", choice.get("matched_stop", _STOP)) == _STOP
            if cut and completion.finish_reason == "stop" and text.rfind(_OPEN) > text.rfind(_CLOSED):
                text = text.removesuffix(_STOP) + _CLOSED
            self._texts[answer] = text

    def put_back(self, prompt: Sequence[WireMessage], path: Sequence[Message]) -> list[WireMessage]:
        """The host's ``prompt`` with its completions as they were sampled. ``path``: the same conversation in the tree.

        A prompt of another length is returned unchanged.
        """
        if len(prompt) != len(path):
            return [*prompt]
        return [self.sent(message, answer) or message for message, answer in zip(prompt, path, strict=True)]

    def sent(self, form: WireMessage, answer: Message) -> WireMessage | None:
        """The message to send for ``answer``, which the host repeats as ``form``; ``None`` to send ``form``."""
        given = form.get("tool_calls") or []
        if form["role"] != "assistant" or [call.get("id") for call in given] != [each.id for each in answer.tool_calls]:
            return None
        if given:
            calls = list(map(_as_sampled, given, answer.tool_calls))
            return None if calls == given else {**form, "tool_calls": calls}
        known = self._texts.get(answer)
        if known is None or read_text(known) != read_text(text_of(form.get("content")) or ""):
            return None
        # In some requests the content has parts, and the last part has the mark of the prompt cache.
        parts = form.get("content")
        text = [{**parts[-1], "type": "text", "text": known}] if isinstance(parts, list) and parts else known
        return {**form, "content": text}


def _as_sampled(call: Any, sampled: ToolCall) -> Any:
    """The call as it was sampled, except for arguments that are no JSON object: servers refuse such a history."""
    form = {**call, "function": {**call["function"], "name": sampled.name, "arguments": sampled.arguments}}
    return form if form == call or is_json_object(sampled.arguments) else call


def read_text(text: str) -> tuple[object, ...]:
    """The parts of a completion's text that hosts keep: the text before its call, name, arguments, and text after it.

    Two texts with equal parts are the same completion in two forms.
    """
    call = CALL.search(text)
    if call is None:
        return (text.strip(),)
    arguments = [(name, _plain(value.strip())) for name, value in PARAMETER.findall(call[2])]
    after = PARAMETER.sub("", call[2]) + text[call.end() :]
    return text[: call.start()].strip(), call[1], arguments, after.strip()


def _plain(value: str) -> str:
    """A list or object in normal form, because hosts parse it and write other white space."""
    if value[:1] not in ("[", "{"):
        return value
    try:
        return json.dumps(json.loads(value))
    except ValueError:
        return value


# Of a request that is not the host's conversation, such as a judgement, only these stay.
_KEPT = frozenset({"model", "max_tokens", "max_completion_tokens"})
_OF_TOOLS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
_ELSEWHERE = frozenset({"stream", "stream_options", "messages"})


class EpisodeOver(RLError):
    """Raised when the session returns no more completions; ``stop`` is the limit that was reached."""

    def __init__(self, stop: StopReason) -> None:
        super().__init__(f"the episode is over: {stop.value}")
        self.stop = stop


@dataclass(frozen=True)
class Turn:
    """A request of the host: its ``body``, its messages (``wire``), and the same conversation in the tree (``path``).

    ``rewritten``: its prompt does not extend the prompt before.
    """

    body: Json
    wire: Sequence[WireMessage]
    path: tuple[Message, ...] = ()
    rewritten: bool = False


class Session(Episode):
    """One episode of a host, which requests each completion here. Its runner freezes the episode at the end.

    A host calls ``answer``, or awaits ``respond``; the strategy then calls ``complete``, as the session is its
    ``LLMEngine``, and ``ask`` sends one request. ``environment_mode``: the model sees only the environment's
    observations. Otherwise it works in a workspace with the tools of OpenHands' CodeAct agent, in ``workspace`` if
    given. ``base_model``: the served name of the model without an adapter. ``token_ids``: whether to request token ids
    from the server. ``strict``: as in ``HostConversation``. ``error``: an error that must stop the whole run; it is
    kept here because OpenHands' controller ends only the session on any exception. ``opinion``: a critic's last score;
    it is stored at the end. ``documents``: each sampled message -> the response of the server.

    A host may set these attributes:

    - ``upstream``: where the next completions are sampled; ``note``: their metadata;
    - ``world``: makes the environment to fork for the decision on the request ``turn``;
    - ``reads``: the host's parser, for strategies that choose (document -> parse error, or ``None``);
    - ``samples``: false if the host's sampling and limits apply, not the session's;
    - ``exact``: false if prompts keep completions in the host's own form, not as they were sampled.
    """

    def __init__(
        self,
        request: EpisodeRequest,
        settings: RLSettings,
        *,
        strategy: Strategy,
        strategy_spec: StrategySpec,
        base_model: str,
        environment_mode: bool,
        workspace: TaskWorkspace | None = None,
        token_ids: bool = True,
        strict: bool = False,
    ) -> None:
        super().__init__(
            request,
            strategy=strategy,
            strategy_spec=strategy_spec,
            policy=PolicyRef.from_served_name(base_model, request.served_model or base_model),
            limits=_limits_of(settings, environment_mode),
        )
        self.settings = settings
        self.base_model = base_model
        self.environment_mode = environment_mode
        self.workspace = workspace
        self.token_ids = token_ids
        # ``limits``, which may be the task's own, bound the length of a completion.
        own = settings.sampling_params().model_copy(update={"max_tokens": None})
        self.sampling = merge_sampling(request.sampling, own)
        self.opinion: Score | None = None
        self.note: JsonObject = {}
        self.world: Callable[[], Forkable | None] | None = None
        self.reads: Callable[[Json], str | None] | None = None
        self.samples = self.exact = True
        self.turn = Turn({}, ())
        self.texts = SampledTexts()
        self._strict = strict
        self.follow_tree()
        self.upstream: Upstream | None = None
        # The live turn and those that forks have reached; the document of each completion; failed requests.
        self._turns: list[Turn] = []
        self.documents: dict[Message, Json] = {}
        self._failed: dict[object, list[JsonObject]] = {}
        self._numbers, self._seeds, self._spent = itertools.count(), ConversationSeeds(), Usage()
        self._deciding = asyncio.Lock()
        self._job: tuple[Job[Json] | None, float] = None, 0.0
        self._stopped = -math.inf
        self._stopping = threading.Lock()

    def follow_tree(self) -> None:
        """Start to match the host's prompts with ``tree``, after it was replaced."""
        self.conversation = HostConversation(
            self.tree,
            strict=self._strict,
            unseen=lambda form, answer: self.texts.sent(form, answer) if self.exact else None,
        )

    @property
    def episode_seed(self) -> int | None:
        """The request's seed, which a search combines with its own."""
        return self.request.seed

    def policy_of(self, served: str) -> PolicyRef:
        """The policy with the served name ``served``."""
        return PolicyRef.from_served_name(self.base_model, served)

    def answer(self, body: Json, at: float = 0.0) -> Json:
        """As ``respond``, for a host that blocks. ``at``: the time in the host's own count, such as an event's id.

        Also raises ``asyncio.CancelledError`` after ``cancel``.
        """
        with self._stopping:
            if at <= self._stopped:
                raise asyncio.CancelledError
            job = Job(self.respond(body), background().loop)
            self._job = job, at
        return job.result()

    def cancel(self, until: float | None = None) -> None:
        """Cancel the running decision and wait for its end. Blocks.

        With ``until``, cancel only decisions that began at that time or before, and later ones.
        """
        with self._stopping:
            self._stopped = max(self._stopped, -math.inf if until is None else until)
            job, at = self._job
        if job is not None and (until is None or at <= until):
            job.cancel()

    async def respond(self, body: Json) -> Json:
        """Let the strategy choose a completion for a host's chat request, store it, and return it as a chat completion.

        The tree follows the prompt, which shows what the host executed, condensed or rewrote; the chosen node is its
        head. Runs on the loop of ``background``. Raises ``EpisodeOver`` at a limit, ``CaughtFailure`` if all requests
        fail (its last cause is the ``ServerError``, if there is one; the host may repeat the request), ``ConfigError``,
        ``StorageError``.
        """
        tree = self.tree
        async with self._deciding:
            wire = body["messages"]
            rewritten = self.conversation.follow(wire)
            if not self.environment_mode and self.settings.workspace.is_compact:
                tree.nodes[0].metadata[PROMPT] = self.settings.workspace.prompt
            tree.tools = tree.tools or tuple(body.get("tools") or ())
            if self.samples and (stop := self.stop or self.limit_reached()) is not None:
                self.stop = stop
                raise EpisodeOver(stop)
            chosen = await self._decided(Turn(body, wire, tree.messages(), rewritten))
            self.conversation.acted(chosen)
            await self.keep_up()
            document = self.documents[tree.nodes[chosen].message]
            return document if self._spent.calls < 2 else {**document, "usage": usage_to_wire(self._spent)}

    async def _decided(self, turn: Turn) -> int:
        """The node that the strategy chooses. Failed requests are noted in the metadata of the prompt's last node."""
        if turn.path != self.turn.path:
            self._failed.clear()
        self.turn, self._spent = turn, Usage()
        # Earlier turns are dropped, unless search can still reach them.
        start = len(turn.path)
        self._turns = [known for known in self._turns if known.path[:start] == turn.path]
        self.expect(turn)
        seeds, turns = deepcopy(self._seeds), self.turns
        try:
            return await self.decide(self.world() if self.world is not None else None)
        finally:
            if self.turns == turns:  # the host may repeat the request with the same seeds
                self._seeds = seeds
            if self.tree.head is not None:
                metadata = self.tree.nodes[self.tree.head].metadata
                metadata.pop("failed_attempts", None)
                if self._failed:
                    metadata["failed_attempts"] = [*itertools.chain.from_iterable(self._failed.values())]

    def expect(self, turn: Turn) -> None:
        """Until the host's next request, use ``turn`` for conversations that begin with ``turn.path``."""
        self._turns = [turn, *(known for known in self._turns if known.path != turn.path)]

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Sample ``n`` completions concurrently. A conversation that extends the host's is sent in the host's form.

        Returns fewer if some calls fail. Raises ``InfrastructureError`` or ``ModelError``, with the ``ServerError`` as
        the cause, if all fail. Earlier completions are stored at the same time; raises ``StorageError``.
        """
        path = tuple(messages)
        begun = [known for known in self._turns if path[: len(known.path)] == known.path]
        turn = max(begun, key=lambda known: len(known.path), default=None)
        if turn is None:
            turn = Turn({name: value for name, value in self.turn.body.items() if name in _KEPT}, ())
        body = turn.body if tools else {name: each for name, each in turn.body.items() if name not in _OF_TOOLS}
        wire = [*turn.wire, *(to_wire(message) for message in path[len(turn.path) :])]
        if self.exact:
            wire = self.texts.put_back(wire, path)
        requests = (self._sampled(body, self.sampling_for(sampling, self._seeds.next(messages))) for _ in range(n))
        calls = [self.ask(each, wire, path=path, rewritten=turn.rewritten) for each in requests]
        kept, *answers = await asyncio.gather(self.keep_up(answers=True), *calls, return_exceptions=True)
        completions = [answer for answer in answers if isinstance(answer, Completion)]
        for error in (kept, *answers):
            if isinstance(error, BaseException) and not (completions and isinstance(error, EpisodeError)):
                raise error
        return completions

    def sampling_for(self, sampling: SamplingParams | None, number: int) -> SamplingParams:
        """The sampling parameters of a completion: the strategy's, else the request's, else the settings'.

        Every call has its own seed: the strategy's or the episode's plus ``number``.
        """
        wanted, limit = merge_sampling(sampling, self.sampling), self.limits.max_response_length
        seed = self.request.seed if wanted.seed is None else wanted.seed
        longest = min(wanted.max_tokens or limit, limit)
        return wanted.model_copy(update={"max_tokens": longest, "seed": (seed + number) % 2**31})

    def _sampled(self, given: Json, wanted: SamplingParams) -> Json:
        """The host's request with the session's sampling parameters instead of the host's."""
        if not self.samples:
            return given
        body = {**given, "temperature": wanted.temperature, "top_p": wanted.top_p, "seed": wanted.seed}
        body |= altering_parameters({name: getattr(wanted, name) for name in NEUTRAL_PARAMETERS})
        longest = "max_tokens" if "max_tokens" in given else "max_completion_tokens"
        body[longest] = min(filter(None, (wanted.max_tokens, given.get(longest))))
        if wanted.stop:
            stop = given.get("stop") or ()
            body["stop"] = list(dict.fromkeys([*([stop] if isinstance(stop, str) else stop), *wanted.stop]))
        if self.request.served_model is not None:
            body["model"] = self.request.served_model
        return body

    async def ask(
        self,
        given: Json,
        wire: Sequence[WireMessage],
        *,
        path: tuple[Message, ...] = (),
        rewritten: bool = False,
        upstream: Upstream | None = None,
    ) -> Completion:
        """Sample one completion of the request ``given`` with the messages ``wire``. Raises as ``complete``.

        Like OpenAI's client, it sends a request up to three times if the server is overloaded or unreachable.
        """
        number, upstream = next(self._numbers), upstream or self.upstream
        assert upstream is not None
        request: Json = {"messages": [*wire]} | {name: value for name, value in given.items() if name not in _ELSEWHERE}
        key = path, request.get("seed")
        asking = Attempts(upstream, extended=self.token_ids, tries=3)
        if self._failed:  # a long path is slow to hash
            asking.log += self._failed.pop(key, [])
        try:
            answer = await asking.ask(request)
        except EpisodeError:
            self._failed[key] = asking.log
            raise
        document, choice = answer.plain(), answer.choices[0]
        answer.choices[0] = replace(choice, message=_fitting(choice.message, document, number))
        metadata: JsonObject = {**self.note, "call": number, "attempts": [*asking.log], "response": document}
        if rewritten:
            metadata["history_rewritten"] = True
        if self.reads is not None and path and (why := self.reads(document)) is not None:
            metadata["malformed"] = why
        policy = self.policy_of(answer.model or str(asking.sent["model"]))
        completion = answer.completion(policy, sampling_in(asking.sent), metadata)
        asking.note_missing(completion)
        self._spent += completion.usage
        if path:
            self.documents[completion.message] = document
            if self.exact and not given.get("tools"):
                self.texts.add(completion)
        return completion

    async def aside(self, body: Json, kind: str, upstream: Upstream) -> Json:
        """Sample a completion from ``upstream`` that is no turn, such as a summary, with the host's sampling.

        It is stored as nodes of this ``kind``. Raises as ``respond``.
        """
        with boundary(FailureKind.MODEL, "session.aside"):
            completion = await self.ask(body, body["messages"], upstream=upstream)
        self.tree.add_side_completion([to_message(message) for message in body["messages"]], completion, kind)
        await self.keep_up()
        document: Any = completion.metadata["response"]
        return document

    def drop_malformed(self, why: str) -> None:
        """Take the last completion off the executed path, because the host could not parse it."""
        tree = self.tree
        assert tree.head is not None
        tree.nodes[tree.head].metadata["malformed"] = why
        self.conversation.leave_out(tree.head)

    def end_here(self, stop: StopReason) -> None:
        """Set why the episode ended. If a search simulated the last action, clear its simulated reward."""
        self.stop = stop
        last = self.tree.nodes[self.tree.head] if self.tree.head is not None else None
        if last is not None and last.sampled and last.simulated:
            last.reward, last.simulated = None, False

    @property
    def sink(self) -> Any:
        """The storage that the episode is written to while it runs, or ``None``."""
        return self._journal.storage if self._journal is not None else None

    async def end(self, trajectory: Trajectory) -> None:
        """Close the episode in the storage, if it is stored while it runs. Raises ``StorageError``."""
        await on_loop(background().loop, super().end(trajectory))
        if self.sink is not None and self.opinion is not None:
            score = self.opinion.model_copy(update={"trajectory_id": trajectory.id})
            await on_loop(background().loop, self.sink.add_scores((score,)))


session_here: ContextVar[Session | None] = ContextVar("rl_session", default=None)
"""The session of an ``RLAgent`` that is created in this context."""


def _limits_of(settings: RLSettings, environment_mode: bool) -> Limits:
    limits = settings.limits()
    if environment_mode or settings.max_prompt_length != RLSettings.model_fields["max_prompt_length"].default:
        return limits
    # The default is for short conversations; the CodeAct agent's own instructions are longer. So the default value is
    # ignored in a workspace, also where a file repeats it, such as an example or the settings of a worker process.
    return limits.model_copy(update={"max_prompt_length": None})


def _fitting(message: Message, document: Json, number: int) -> Message:
    """Make a completion valid for a host, which parses and repeats it: text content, and an id for each call.

    Changes ``document`` in place and returns the message.
    """
    sent = document["choices"][0]["message"]
    for at, call in enumerate(own := [*message.tool_calls]):
        own[at] = call if call.id else call.model_copy(update={"id": f"call_{number}_{at}"})
    message, calls = message.model_copy(update={"tool_calls": tuple(own)}), wire_calls(own)
    if calls and sent.get("tool_calls") != calls:
        sent = {**sent, "tool_calls": calls}
    if message.content is None or not isinstance(sent.get("content"), str | None):
        sent = {**sent, "content": message.content}
    document["choices"] = [{**document["choices"][0], "message": sent}]
    return message


Complete = Callable[[Json], Json]
"""A host's request -> the response document. Blocks; raises ``EpisodeOver``."""


class Branch(Protocol):
    """A copy of a host's session, which waits for the response to a request. All methods block.

    The live session is also a branch, but is only forked, never run.
    """

    @property
    def workspace(self) -> Any:
        """The branch's copy of the workspace. All its methods block.

        ``changes()`` returns the changes since the session began, ``check(command)`` runs a ``WorkspaceCommand`` in it.
        The caller calls ``close()``.
        """
        ...

    def run(self, complete: Complete) -> None:
        """Run the host from that request until its agent ends, with ``complete`` as the model.

        Raises any error that ends a session of the host.
        """
        ...

    def fork(self) -> Branch:
        """A copy. Raises ``BadEnvironmentError`` or ``InfrastructureError``."""
        ...


class BranchWorld:
    """An ``Environment`` over a branch, in the middle of an episode. Over the ``live`` branch it is only forked.

    A branch is an ordinary session of the host in its own thread, blocked on a request. ``step`` passes the strategy's
    completion to the host, which executes it. The host's next request is the observation, and blocks again. So a branch
    returns the same observations as the live session; its first prompt must equal the live one. ``turn``: the pending
    request of the branch.
    """

    info = EnvInfo(emits_rewards=False)

    def __init__(self, live: Branch, session: Session, turn: Turn | None = None) -> None:
        self.session = session
        self.turn = turn or session.turn
        self._branch = live
        self._loop = asyncio.get_running_loop()
        self._requests: asyncio.Queue[Json | None] = asyncio.Queue()
        self._answer: Future[Json] = Future()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failure: CaughtFailure | None = None

    async def reset(self, task: Task) -> Observation:
        """Not supported: a branch begins in the middle of an episode."""
        raise RuntimeError("a branch cannot be reset: it continues an episode")

    async def step(self, action: Message) -> Observation:
        """Execute a completion that the session sampled; returns the observation that the model would get.

        Raises ``BadEnvironmentError`` for an action that a fork cannot execute.
        """
        before, session = self.turn, self.session
        if self._thread is None:
            run = copy_context().run
            self._thread = threading.Thread(target=run, args=(self._run,), name="rl-branch", daemon=True)
            self._thread.start()
            wire = await self._prompt()
            if wire is None or not _same(wire, before.wire):
                raise BadEnvironmentError("the branch does not begin with the live session's prompt")
        waiting, self._answer = self._answer, Future()
        waiting.set_result(session.documents[action])
        wire, known = await self._prompt(), len(before.wire)
        if wire is None:
            return Observation(terminated=True)
        if not _same(wire[:known], before.wire):
            raise BadEnvironmentError("the branch cannot continue the conversation: its host rewrites earlier messages")
        # The prompt repeats the completion first, in the host's own form, unless the host could not parse it.
        replayed = len(wire) > known and wire[known]["role"] == "assistant"
        new = tuple(to_message(message) for message in wire[known + replayed :])
        # Turns share the earlier messages, because a search holds very many turns.
        self.turn = Turn(before.body, [*before.wire, *wire[known:]], (*before.path, action, *new))
        session.expect(self.turn)
        return Observation(messages=new)

    async def fork(self) -> BranchWorld:
        """A copy. Raises ``BadEnvironmentError`` or ``InfrastructureError``."""
        return BranchWorld(await background().blocking(self._branch.fork), self.session, self.turn)

    async def evidence(self) -> JsonObject:
        """The changes to the workspace since the session began."""
        return await background().blocking(self._branch.workspace.changes)

    async def check(self, asked: WorkspaceCommand) -> CommandEvidence:
        """Run a command over the workspace as it stands, in a fresh sandbox."""
        return await background().blocking(lambda: self._branch.workspace.check(asked))

    async def close(self) -> None:
        """End the host's run without a retry, end its processes, and remove its files."""
        self._closed = True
        if not self._answer.done():
            self._answer.set_exception(EpisodeOver(StopReason.NO_ACTION))
        await background().blocking(self._branch.workspace.close)

    async def _prompt(self) -> Sequence[WireMessage] | None:
        """The messages of the host's next request; ``None`` after its agent ended.

        Raises ``CaughtFailure`` when the host has failed.
        """
        if (body := await self._requests.get()) is None:
            if self._failure is not None:
                raise self._failure
            return None
        return body["messages"]

    def _run(self) -> None:
        try:
            with suppress(EpisodeOver), boundary(FailureKind.ENVIRONMENT, "search.simulate"):
                self._branch.run(self._complete)
        except CaughtFailure as caught:
            self._failure = caught
        self._loop.call_soon_threadsafe(self._requests.put_nowait, None)

    def _complete(self, body: Json) -> Json:
        if self._closed:
            raise EpisodeOver(StopReason.NO_ACTION)
        waiting = self._answer
        self._loop.call_soon_threadsafe(self._requests.put_nowait, body)
        return waiting.result()


def _same(one: Sequence[WireMessage], other: Sequence[WireMessage]) -> bool:
    return len(one) == len(other) and all(a == b or equals(a, to_message(b)) for a, b in zip(one, other, strict=True))
