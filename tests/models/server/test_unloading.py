"""What runs on an adapter while it is unloaded ends on the version that it began with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from tiny_model import write_adapter

from openhands_rl_plugin.models.generator.config import GeneratorConfig, ServerConfig
from openhands_rl_plugin.models.generator.generator import Generator
from openhands_rl_plugin.models.server.app import running_server

PAIRS = 24
TOKENS = 48
MESSAGES = [{"role": "user", "content": "one two three"}]


@pytest.fixture(scope="module")
def weights(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("versions")
    return write_adapter(root / "x", tiny_model, seed=11), write_adapter(root / "y", tiny_model, seed=12)


@pytest.fixture(scope="module", params=[PAIRS, 4], ids=["room for all", "room for four"])
def served(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    options = {"model": str(tiny_model), "dtype": "float32", "threads": 1, "max_batch": 16}
    with (
        Generator(GeneratorConfig(**options, max_adapters=request.param)) as generator,
        running_server(ServerConfig(model="tiny", port=0, adapters="/"), generator) as url,
    ):
        yield url


def asked(name: str, *, stream: bool) -> dict[str, object]:
    fixed = {"temperature": 0, "ignore_eos": True, "max_tokens": TOKENS, "return_token_ids": True}
    return {"model": name, "messages": MESSAGES, "stream": stream, **fixed}


async def streamed(http: httpx.AsyncClient, name: str, begun: asyncio.Event) -> list[int]:
    ids: list[int] = []
    async with http.stream("POST", "/v1/chat/completions", json=asked(name, stream=True)) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return ids
            if line:
                choices = json.loads(line.removeprefix("data: "))["choices"]
                ids += choices[0].get("token_ids") or []
                if ids:
                    begun.set()
    raise AssertionError("the stream broke off")


async def whole(http: httpx.AsyncClient, name: str) -> list[int] | None:
    """The ids, ``None`` where the adapter was gone before the request."""
    answer = await http.post("/v1/chat/completions", json=asked(name, stream=False))
    if answer.status_code == 404:
        return None
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


async def load(http: httpx.AsyncClient, name: str, path: Path) -> None:
    """Wait for a place: a full server says so, and a request for what was not loaded is a 404."""
    while (
        answer := await http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})
    ).is_error:
        assert answer.status_code == 400 and "which is this server's limit" in answer.text
        await asyncio.sleep(0.05)


async def unload(http: httpx.AsyncClient, name: str) -> None:
    assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": name})).status_code == 200


@pytest.fixture
async def http(served: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=served, timeout=120, trust_env=False, limits=limits) as client:
        yield client


@pytest.mark.slow
async def test_24_pairs_of_load_and_unload_at_once(http: httpx.AsyncClient, weights: tuple[Path, Path]) -> None:
    expected: list[list[int]] = []
    for path in weights:
        await load(http, "reference", path)
        expected.append(await whole(http, "reference") or [])
        await unload(http, "reference")
    assert expected[0] != expected[1] and len(expected[0]) == TOKENS

    async def pair(number: int) -> None:
        """Under one name, first the one version, then the other."""
        for path, right in zip(weights, expected, strict=True):
            name, begun = f"v{number}", [asyncio.Event() for _ in range(3)]
            await load(http, name, path)
            streams = [asyncio.create_task(streamed(http, name, each)) for each in begun]
            for each in begun:
                await each.wait()
            leaving = asyncio.create_task(unload(http, name))
            racing = asyncio.create_task(whole(http, name))
            assert [await stream for stream in streams] == [right] * 3
            # What races with the unloading is served whole, or not at all.
            assert await racing in (right, None)
            await leaving
            assert await whole(http, name) is None

    async with asyncio.timeout(240):
        await asyncio.gather(*(pair(number) for number in range(PAIRS)))
