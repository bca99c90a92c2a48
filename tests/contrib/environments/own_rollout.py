"""Verifiers' own rollout of one task with scripted answers, by its own harness and client: what its reward is.

PYTHON own_rollout.py '{"taskset": ID, "options": {}, "index": N, "answers": [message, ...]}'     # prints JSON
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import sys

import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config

with contextlib.suppress(ImportError):
    import nltk

    nltk.download = lambda *names, **options: True  # Its words are those that are here.

OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


async def main() -> None:
    job = json.loads(sys.argv[1])
    answers = iter(job["answers"])

    async def complete(request: web.Request) -> web.StreamResponse:
        body, message = await request.json(), next(answers)
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        calls = [{"index": at, **call} for at, call in enumerate(message.get("tool_calls") or [])]
        delta = {**message, **({"tool_calls": calls} if calls else {})}
        choice = {"index": 0, "delta" if body.get("stream") else "message": delta, "finish_reason": reason}
        kind = "chat.completion.chunk" if body.get("stream") else "chat.completion"
        found = {"id": "c", "object": kind, "created": 1, "model": "m", "choices": [choice], "usage": usage}
        if body.get("stream"):
            return web.Response(text=f"data: {json.dumps(found)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")
        return web.json_response(found)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    taskset = {**job["options"], "id": job["taskset"]}
    role = next(iter(agent_config_fields(env_config_type(job["taskset"])(taskset=taskset))))
    seat = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    env = load_environment(resolve_env_config({"taskset": taskset, role: seat}))
    task = next(itertools.islice(env.taskset, job["index"], None))
    client = vf.EvalClientConfig(base_url=url, api_key_var="NO_KEY")
    async with env.serving():
        episode = await env.run_slot(env.slots(task)[0], vf.ModelContext(model="m", client=client))
    trace = episode.traces[-1]
    rewards = {name: None if each is None else each.score for name, each in trace.rewards.items()}
    errors = [each.message for each in (*episode.errors, *trace.errors)]
    print(json.dumps({"reward": trace.reward, "rewards": rewards, "errors": errors}), file=OUT, flush=True)
    await runner.cleanup()


logging.disable(logging.INFO)
asyncio.run(main())
