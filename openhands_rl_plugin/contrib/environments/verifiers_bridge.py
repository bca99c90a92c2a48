"""The other end: executed by the Python that has verifiers, which plays the episodes while this package answers.

The text of this file is executed (``python -c``), so it imports the standard library and verifiers only. It speaks JSON
lines. The first line on stdin is the set-up, ``{"env": {...}, "role", "runtime", "harness", "max_turns"}``,
answered ``{"ready": true}`` or ``{"refused": why}``. Then, of any number of episodes at once:

* ``{"episode", "start": index}``, ``{"episode", "answer": message}`` and ``{"episode", "cut": true}`` come in;
* ``{"episode", "request": {"messages", "tools"}}``, and last ``{"episode", "end": {...}}`` or ``{"episode", "failed":
  why}``, go out.

A model request of verifiers reaches this process over loopback, by the same client that its own ``eval`` uses, and
waits for the answer. Rewards are those of verifiers' own scoring of the finished trace. The end of stdin ends
everything.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import secrets
import sys
import threading
import time
import types
from typing import Any

OUT = os.fdopen(os.dup(1), "w", buffering=1)
# What tasksets print must not stand between the lines.
os.dup2(2, 1)
SECRET = secrets.token_hex(16)
POLICY = "openhands_rl_policy"


def say(line):
    OUT.write(json.dumps(line) + "\n")
    OUT.flush()


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
                        told = {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": text}
                        messages.append(told)

        async def call(self, call, dispatch, opened, call_mcp):
            try:
                arguments = json.loads(call.function.arguments or "{}")
            except ValueError as error:
                return f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
            if not isinstance(arguments, dict):
                return (
                    f"error: tool arguments must be a JSON object, got {type(arguments).__name__}; resend as an object"
                )
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
        others = [name for name in roles if name != self.role and not (raw.get(name) or {}).get("model")]
        if others:
            raise ValueError(
                f"{taskset} is played by several models: give {', '.join(others)} a model and a client in env, as in "
                f"env = {{ {others[0]} = {{ model = ..., client = {{ base_url = ... }} }} }}, or choose another role"
            )
        seat = dict(raw.get(self.role) or {})
        seat.setdefault("harness", {"id": setup["harness"] or POLICY})
        seat.setdefault("runtime", setup["runtime"])
        seat.setdefault("max_turns", setup["max_turns"] or None)
        self.env = load_environment(resolve_env_config({**raw, self.role: seat}))
        self.tasks, self.stream = [], iter(self.env.taskset)
        self.waiting, self.slots, self.number_of = {}, {}, itertools.count()
        self.cut = set()
        self.url = ""

    def task(self, index):
        missing = index + 1 - len(self.tasks)
        if missing > 0:
            self.tasks += itertools.islice(self.stream, missing)
        if index >= len(self.tasks):
            raise IndexError(f"the taskset has the tasks 0 to {len(self.tasks) - 1}, and no {index}")
        return self.tasks[index]

    async def serve(self, reader):
        from aiohttp import web

        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/{secret}/{episode}/v1/chat/completions", self.complete)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/{SECRET}"
        running = set()
        async with self.env.serving():
            bounded = getattr(self.env.taskset, "bounded", True)
            say({"ready": True, "bounded": bool(bounded), "role": self.role})
            while (line := await reader.get()) is not None:
                number = line["episode"]
                if "start" in line:
                    running.add(task := asyncio.create_task(self.play(number, line["start"])))
                    task.add_done_callback(running.discard)
                elif (future := self.waiting.get(number)) is not None and not future.done():
                    future.set_result(line)
                elif "cut" in line:
                    # Between two requests, or after a timeout of the caller: the next request ends the episode.
                    self.cut.add(number)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        await runner.cleanup()

    async def complete(self, request):
        from aiohttp import web

        number, body = int(request.match_info["episode"]), await request.json()
        if request.match_info["secret"] != SECRET:
            return web.Response(status=403)
        future = self.waiting[number] = asyncio.get_running_loop().create_future()
        if number in self.cut:
            future.set_result({"cut": True})
        else:
            say({"episode": number, "request": {"messages": body["messages"], "tools": body.get("tools") or []}})
        line = await future
        if "answer" not in line:
            for trace in self.slots[number].traces:
                trace.stop("max_total_tokens")
            error = {"error": {"message": "the episode was cut by a limit of the caller", "type": "cut"}}
            return web.json_response(error, status=400)
        message = line["answer"]
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        head = {"id": f"chatcmpl-{secrets.token_hex(8)}", "created": int(time.time()), "model": body["model"]}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": reason}
            return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
        calls = [{"index": at, **call} for at, call in enumerate(message.get("tool_calls") or [])]
        delta = {**message, **({"tool_calls": calls} if calls else {})}
        chunk = {**head, "object": "chat.completion.chunk", "usage": usage}
        chunk["choices"] = [{"index": 0, "delta": delta, "finish_reason": reason}]
        text = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")

    async def play(self, number, index):
        (found,) = await asyncio.gather(self.episode(number, index), return_exceptions=True)
        self.slots.pop(number, None)
        self.waiting.pop(number, None)
        self.cut.discard(number)
        say({"episode": number, **({"failed": told(found)} if isinstance(found, BaseException) else {"end": found})})

    async def episode(self, number, index):
        self.slots[number] = slot = self.env.slots(self.task(index))[0]
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


def told(error):
    return f"{type(error).__name__}: {error}"[:2000]


async def make(setup):
    import verifiers.v1 as vf

    sys.modules[POLICY] = policy_harness(vf)
    logging.disable(logging.INFO)
    return Bridge(setup, vf)


async def main():
    setup = json.loads(sys.stdin.readline())
    (bridge,) = await asyncio.gather(make(setup), return_exceptions=True)
    if isinstance(bridge, BaseException):
        return say({"refused": told(bridge)})
    loop, lines = asyncio.get_running_loop(), asyncio.Queue()

    def read():
        for text in sys.stdin:
            loop.call_soon_threadsafe(lines.put_nowait, json.loads(text))
        loop.call_soon_threadsafe(lines.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    await bridge.serve(lines)


asyncio.run(main())
os._exit(0)  # tasksets may leave threads behind
