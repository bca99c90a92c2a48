"""OpenHands as an agent loop of verl 0.9's V1 trainer. Imported by the Python that has verl; OpenHands is in another.

verl's servers take and give token ids, so each episode gets a chat endpoint over them on loopback, with a key.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from openhands_rl_plugin.apps.rollout.rollout import roll_out
from openhands_rl_plugin.contrib.trainers.rows import agent_loop_rows
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.core.servers import AccessRules, listening, serving
from openhands_rl_plugin.models.generator.config import Overloaded, ServingError
from openhands_rl_plugin.models.generator.sequence import DecodingParams, Generation, ScoredToken
from openhands_rl_plugin.models.server.app import PromptRenderer
from openhands_rl_plugin.models.server.wire import (
    ERROR_HANDLERS,
    ChatCompletionRequest,
    Formatter,
    chat_body,
    json_response,
    models_body,
    new_id,
    usage,
)

MODEL = "policy"
TASK = "task"
"""The column of the data set with the task: an id of a suite, or a whole row as JSON."""

type Sample = Callable[[tuple[int, ...], int], Awaitable[Any]]
"""Prompt ids and the most tokens -> verl's ``TokenOutput`` (``token_ids``, ``log_probs``, ``stop_reason``)."""


@contextmanager
def policy_endpoint(sample: Sample, tokenizer: Any, max_model_len: int) -> Iterator[tuple[str, str]]:
    """Within it an endpoint's model is ``sample``, in this event loop; yields the endpoint's base URL and key.

    ``max_model_len``: tokens of prompt and completion together. What a request has of sampling is verl's to set.
    """
    loop, renderer = asyncio.get_running_loop(), PromptRenderer(tokenizer)

    async def models(_: Request) -> Response:
        return json_response(models_body([{"id": MODEL}]))

    async def chat(request: Request) -> Response:
        body = ChatCompletionRequest.model_validate_json(await request.body())
        ids = await asyncio.to_thread(renderer.chat, body)
        most = min(body.limit or max_model_len, max_model_len - len(ids))
        if most < 1:
            raise ServingError(f"This model's maximum context length is {max_model_len} tokens.")

        async def sampled() -> Any:
            return await sample(ids, most)

        output = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(sampled(), loop))
        if output.stop_reason == "aborted" or not output.token_ids:
            raise Overloaded("verl's server gave up the request")
        if output.log_probs is None or len(output.log_probs) != len(output.token_ids):
            raise ServingError("verl's server gave no logprobs")
        tokens = zip(output.token_ids, output.log_probs, strict=True)
        generation = Generation(
            ids,
            DecodingParams(max_tokens=most),
            tokenizer,
            sampled=[ScoredToken(*each) for each in tokens],
            text=tokenizer.decode(output.token_ids, skip_special_tokens=True),
            finish_reason="length" if len(output.token_ids) >= most else "stop",
        )
        whole = body.model_copy(update={"logprobs": True, "return_token_ids": True})
        choice = Formatter(tokenizer).chat_choice(0, generation, whole)
        more = {"prompt_logprobs": None, "prompt_token_ids": list(ids)}
        return json_response(chat_body(new_id("chatcmpl"), MODEL, [choice], usage([generation]), **more))

    routes = [Route("/v1/chat/completions", chat, methods=["POST"]), Route("/v1/models", models)]
    app, key = Starlette(routes=routes, exception_handlers=ERROR_HANDLERS), secrets.token_urlsafe(24)
    with (
        listening("127.0.0.1", 0) as listener,
        serving(app, listener, access=AccessRules(key), lifespan="off") as url,
    ):
        yield f"{url}/v1", key


class OpenHandsAgentLoop(AgentLoopBase):
    """Rolls out the task of a row by OpenHands, in the Python that ``OPENHANDS_RL_PYTHON`` names.

    ``options``: those of ``cli.rollout``, with underscores. ``store``: a folder that keeps the episodes. Raises
    ``ConfigError`` for what would be trained wrongly.
    """

    def __init__(self, *args: Any, options: Mapping[str, Any] | None = None, store: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._options, self._store = options or {}, store
        if not self.config.trainer.get("use_v1", False):
            raise ConfigError("set trainer.use_v1=True: the other trainer has no place for an episode that failed")
        for name, neutral in (("top_p", (1,)), ("top_k", (-1, 0))):
            if (given := self.rollout_config.get(name, neutral[0])) not in neutral:
                raise ConfigError(
                    f"actor_rollout_ref.rollout.{name}={given}: logprobs are then not the policy's; leave it out"
                )

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[Any]:
        """One ``AgentLoopOutput`` a segment. Raises ``InfrastructureError`` for a failed episode: verl then drops the
        prompt, and nothing is trained on a reward that nobody gave."""
        task = row.get(TASK) or (row.get("extra_info") or {}).get(TASK)
        if not isinstance(task, str) or not task:
            raise ConfigError(f"the data set needs a column {TASK!r}, with an id of a suite or a row as JSON")
        sizes = self.rollout_config
        longest = sizes.get("max_model_len") or sizes.prompt_length + sizes.response_length
        temperature = float(sampling_params.get("temperature", 1.0))
        name = uuid.uuid4().hex  # the same server for all turns, which has their prefix

        async def sample(ids: tuple[int, ...], most: int) -> Any:
            asked = {**sampling_params, "logprobs": True, "max_tokens": most}
            return await self.server_manager.generate(name, prompt_ids=list(ids), sampling_params=asked)

        with policy_endpoint(sample, self.tokenizer, longest) as (url, key):
            asked = {**self._options, "base_url": url, "model": MODEL, "temperature": temperature}
            rollout = await roll_out(task, asked, key=key, store=self._store)
        if isinstance(rollout, str):
            raise InfrastructureError(f"{task[:80]}: {rollout}")
        if rollout.off_policy:
            raise ConfigError(f"completions that are no samples of the policy cannot be trained: {rollout.off_policy}")
        rows = agent_loop_rows(
            rollout,
            longest_prompt=sizes.prompt_length,
            longest_response=sizes.response_length,
            temperature=temperature,
        )
        # verl copies it from the last output to the others, and expects it there.
        more = {"reward_extra_info": {}}
        return [AgentLoopOutput(**{**each, "extra_fields": {**each["extra_fields"], **more}}) for each in rows]
