"""The other end: executed by the Python that has verifiers, which runs the episodes while this package answers.

The text of this file is executed (``python -c``), so it imports the standard library and verifiers only. The first line
on stdin is the set-up as JSON, ``{"env": {...}, "role", "max_turns"}``; the one line on stdout is
``{"url": ...}`` of its server on loopback, or ``{"refused": why}``. The end of stdin ends everything. Then:

* ``POST URL/start`` with ``{"index"}`` starts an episode, ``POST URL/answer`` with ``{"episode", "answer": message or
  null}`` gives it a completion, or cuts it. Both are answered with ``{"episode"}`` and the next of it: ``{"request":
  {"messages", "tools"}}``, and last ``{"end": {...}}`` or ``{"failed": why}``.

A model request of verifiers reaches the same server, by the same client that its own ``eval`` uses, and waits for the
answer. Rewards are those of verifiers' own scoring of the finished trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import secrets
import sys
import time
import types
from typing import Any

from aiohttp import web

OUT = os.fdopen(os.dup(1), "w", buffering=1)
# What tasksets print must not stand between the lines.
os.dup2(2, 1)
SECRET = secrets.token_hex(16)
POLICY = "openhands_rl_policy"


def policy_harness(vf):
    """A module with a harness like verifiers' ``null``, in this process: no program is installed or started."""
    from openai import AsyncOpenAI
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
    from verifiers.v1.runtimes import ProgramResult

    class PolicyHarness(vf.Harness[vf.HarnessConfig]):
        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [message_to_wire(each) for each in prompt or []]
            async with contextlib.AsyncExitStack() as stack:
                client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None)
                stack.push_async_callback(client.close)
                servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
                tools, dispatch, opened = await connect_mcp({"mcpServers": servers}, stack)
                while True:
                    asked: Any = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                    found = await client.chat.completions.create(**asked)
                    message = found.choices[0].message
                    messages.append(message.model_dump(exclude_none=True))
                    if not message.tool_calls:
                        return ProgramResult(exit_code=0, stdout="", stderr="")
                    for call in message.tool_calls:
                        text = await self.call(call, dispatch, opened, call_mcp)
                        result = {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": text}
                        messages.append(result)

        async def call(self, call, dispatch, opened, call_mcp):
            arguments = None
            with contextlib.suppress(ValueError):
                arguments = json.loads(call.function.arguments or "{}")
            if not isinstance(arguments, dict):
                return "error: the arguments of the tool are no JSON object; resend the call with valid JSON"
            if call.function.name not in dispatch:
                return f"error: unknown tool {call.function.name!r}"
            return await call_mcp(opened, dispatch, call.function.name, arguments)

    module = types.ModuleType(POLICY)
    vars(module).update(PolicyHarness=PolicyHarness, __all__=["PolicyHarness"])
    return module


class Bridge:
    """One environment of verifiers, and its running episodes."""

    def __init__(self, setup, vf):
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config

        self.vf = vf
        raw = dict(setup["env"])
        taskset = raw["taskset"]["id"]
        roles = agent_config_fields(env_config_type(taskset, raw.get("id", ""))(taskset=raw["taskset"]))
        self.role = setup["role"] or next(iter(roles), "")
        if self.role not in roles:
            raise ValueError(f"{taskset} has no role {self.role!r}; it has {', '.join(roles)}")
        seat = dict(raw.get(self.role) or {})
        seat.setdefault("harness", {"id": POLICY})
        seat.setdefault("runtime", {"type": "subprocess"})
        seat.setdefault("max_turns", setup["max_turns"] or None)
        self.env = load_environment(resolve_env_config({**raw, self.role: seat}))
        self.tasks, self.stream = [], iter(self.env.taskset)
        self.episodes, self.numbers, self.url = {}, itertools.count(), ""

    def task(self, index):
        missing = index + 1 - len(self.tasks)
        if missing > 0:
            self.tasks += itertools.islice(self.stream, missing)
        if index >= len(self.tasks):
            raise IndexError(f"the taskset has the tasks 0 to {len(self.tasks) - 1}, and no {index}")
        return self.tasks[index]

    async def serve(self):
        """Serve until stdin ends."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post(f"/{SECRET}/start", self.start)
        app.router.add_post(f"/{SECRET}/answer", self.answer)
        app.router.add_post(f"/{SECRET}/{{episode}}/v1/chat/completions", self.complete)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/{SECRET}"
        async with self.env.serving():
            print(json.dumps({"url": self.url}), file=OUT)
            await asyncio.to_thread(sys.stdin.read)
            running = [each.running for each in self.episodes.values()]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        await runner.cleanup()

    async def start(self, request):
        number, asked = next(self.numbers), await request.json()
        episode = self.episodes[number] = types.SimpleNamespace(sent=asyncio.Queue(), received=asyncio.Queue())
        episode.running = asyncio.create_task(self.roll_out(number, asked["index"]))
        return await self.next(number)

    async def answer(self, request):
        given = await request.json()
        self.episodes[given["episode"]].received.put_nowait(given["answer"])
        if given.get("left"):  # nobody waits for its end
            self.episodes[given["episode"]].end = asyncio.create_task(self.next(given["episode"]))
            return web.json_response({})
        return await self.next(given["episode"])

    async def next(self, number):
        found = await self.episodes[number].sent.get()
        if "request" not in found:
            del self.episodes[number]
        return web.json_response({"episode": number, **found})

    async def complete(self, request):
        episode, body = self.episodes[int(request.match_info["episode"])], await request.json()
        episode.sent.put_nowait({"request": {"messages": body["messages"], "tools": body.get("tools") or []}})
        message = await episode.received.get()
        if message is None:
            for trace in episode.slot.traces:
                trace.stop("max_total_tokens")
            error = {"error": {"message": "the episode was cut by a limit of the caller", "type": "cut"}}
            return web.json_response(error, status=400)
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        return web.json_response(
            {
                "id": f"chatcmpl-{secrets.token_hex(8)}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": body["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": reason}],
                "usage": usage,
            }
        )

    async def roll_out(self, number, index):
        (found,) = await asyncio.gather(self.run(number, index), return_exceptions=True)
        ended = {"failed": described(found)} if isinstance(found, BaseException) else {"end": found}
        self.episodes[number].sent.put_nowait(ended)

    async def run(self, number, index):
        self.episodes[number].slot = slot = self.env.slots(self.task(index))[0]
        client = self.vf.EvalClientConfig(base_url=f"{self.url}/{number}/v1", api_key_var="OPENHANDS_RL_NO_KEY")
        return self.summary(await self.env.run_slot(slot, self.vf.ModelContext(model="policy", client=client)))

    def summary(self, episode):
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        own = [trace for trace in episode.traces if trace.agent.name in (self.role, "agent", None)]
        trace = own[-1] if own else None
        rewards = trace.rewards if trace is not None else {}
        return {
            "errors": [{"type": each.type, "message": each.message[:1000]} for each in errors],
            "reward": None if trace is None else float(trace.reward),
            "rewards": {
                name: None if each is None else {"score": each.score, "weight": each.weight}
                for name, each in rewards.items()
            },
            "metrics": dict(trace.metrics) if trace is not None else {},
            "stop": None if trace is None else trace.stop_condition,
            "truncated": bool(trace is not None and trace.is_truncated),
            "task": None if trace is None else trace.task.key,
        }


def described(error):
    return f"{type(error).__name__}: {error}"[:2000]


async def make(setup):
    import verifiers.v1 as vf

    sys.modules[POLICY] = policy_harness(vf)
    logging.disable(logging.INFO)
    return Bridge(setup, vf)


async def main():
    (bridge,) = await asyncio.gather(make(json.loads(sys.stdin.readline())), return_exceptions=True)
    if isinstance(bridge, BaseException):
        print(json.dumps({"refused": described(bridge)}), file=OUT)
    else:
        await bridge.serve()


asyncio.run(main())
os._exit(0)  # tasksets may leave threads behind
