"""The life cycle of adapters: what is loaded, what is refused, and reloading under load."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file
from tiny_model import write_adapter, write_model

from openhands_rl_plugin.models.generator.generator import Generator
from openhands_rl_plugin.models.generator.sequence import DecodingParams


@pytest.fixture
def http(server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server, timeout=30) as client:
        yield client


def load(http: httpx.Client, name: str, path: Path | str) -> httpx.Response:
    return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})


def unload(http: httpx.Client, name: str) -> httpx.Response:
    return http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def edited_config(path: Path, source: Path, **changes: object) -> Path:
    shutil.copytree(source, path)
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path


def test_load_use_unload(http: httpx.Client, adapter_a: Path) -> None:
    answer = load(http, "policy-v000001", adapter_a)
    assert answer.status_code == 200
    assert answer.text == "Success: LoRA adapter 'policy-v000001' added successfully."
    again = load(http, "policy-v000001", adapter_a)
    assert again.status_code == 400 and "has already been loaded" in again.json()["error"]["message"]
    body = {"model": "policy-v000001", "prompt": "one two", "max_tokens": 5, "temperature": 0}
    used, expected = (http.post("/v1/completions", json=body | {"model": m}).json() for m in (body["model"], "a"))
    assert used["choices"][0]["text"] == expected["choices"][0]["text"]
    answer = unload(http, "policy-v000001")
    assert answer.text == "Success: LoRA adapter 'policy-v000001' removed successfully."
    gone = http.post("/v1/completions", json=body)
    assert gone.status_code == 404
    assert gone.json()["error"]["message"] == "The model `policy-v000001` does not exist."
    unknown = unload(http, "policy-v000001")
    assert unknown.status_code == 404 and unknown.json()["error"]["type"] == "NotFoundError"
    assert unknown.json()["error"]["message"] == "The lora adapter 'policy-v000001' cannot be found."


@pytest.mark.parametrize("name", ["../evil", "a/b", "a\\b", "", ".", "..", "x" * 200, "white space", "tiny"])
def test_names_that_are_refused(http: httpx.Client, adapter_a: Path, name: str) -> None:
    response = load(http, name, adapter_a)
    assert response.status_code == 400
    assert "\n" not in response.json()["error"]["message"]


def test_unfit_adapters_are_refused_with_one_line(http: httpx.Client, adapter_a: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", hidden_size=32)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(adapter_a / "adapter_config.json", pickled)
    (pickled / "adapter_model.bin").write_bytes(b"\x80\x04")
    broken = tmp_path / "broken"
    shutil.copytree(adapter_a, broken)
    (broken / "adapter_model.safetensors").write_bytes(b"garbage")
    infinite = tmp_path / "infinite"
    shutil.copytree(adapter_a, infinite)
    weights = load_file(infinite / "adapter_model.safetensors")
    save_file({key: weight * float("inf") for key, weight in weights.items()}, infinite / "adapter_model.safetensors")
    wrong_shape = write_adapter(tmp_path / "wrong-shape", other, seed=1)
    base = json.loads((adapter_a / "adapter_config.json").read_text())["base_model_name_or_path"]
    claimed = edited_config(tmp_path / "claimed", wrong_shape, base_model_name_or_path=base)
    cases = [
        (tmp_path / "nothing", 404, "No adapter found"),
        (wrong_shape, 400, "trained on"),
        (claimed, 400, "in the model"),
        (edited_config(tmp_path / "dora", adapter_a, use_dora=True), 400, "use_dora is not supported"),
        (edited_config(tmp_path / "bdlora", adapter_a, use_bdlora={"nblocks": 2}), 400, "use_bdlora is not supported"),
        (edited_config(tmp_path / "kind", adapter_a, peft_type="IA3"), 400, "not that of a LoRA"),
        (pickled, 400, "pickled weights are not loaded"),
        (broken, 400, "cannot be read"),
        (infinite, 400, "not finite"),
    ]
    for path, status, text in cases:
        response = load(http, "unfit", path)
        message = response.json()["error"]["message"]
        assert (response.status_code, text in message, "\n" in message) == (status, True, False), message
    assert {card["id"] for card in http.get("/v1/models").json()["data"]} == {"tiny", "a", "b"}


@pytest.mark.parametrize(
    "changes",
    [
        *({"lora_alpha": None}, {"lora_alpha": "8"}, {"lora_alpha": 1e308}, {"r": 0}, {"rank_pattern": {".*": None}}),
        *({"base_model_name_or_path": 5}, {"rank_pattern": {"(": 4}}, {"alpha_pattern": 7}),
    ],
)
def test_a_config_with_values_of_any_kind_is_refused_with_one_line(
    http: httpx.Client, adapter_a: Path, tmp_path: Path, changes: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    refused = load(http, "odd", edited_config(tmp_path / "odd", adapter_a, **changes))
    assert (refused.status_code, "\n" in refused.json()["error"]["message"]) == (400, False), refused.text
    (tmp_path / "odd" / "adapter_config.json").write_text("[" * 100_000)
    assert load(http, "odd", tmp_path / "odd").status_code == 400
    assert not [record for record in caplog.records if record.exc_info]


def test_the_number_of_adapters_is_bounded(http: httpx.Client, adapter_a: Path) -> None:
    try:
        answers = [load(http, f"many-{i}", adapter_a).status_code for i in range(8)]
        assert answers == [200] * 6 + [400] * 2
    finally:
        for i in range(6):
            unload(http, f"many-{i}")


def test_requests_in_flight_finish_on_their_version(generator: Generator, adapter_a: Path, adapter_b: Path) -> None:
    params = DecodingParams(temperature=0, max_tokens=60, ignore_eos=True)
    expected = generator.generate([5, 6, 7], params, adapter="a")
    generator.load_adapter("same-name", adapter_a)
    ticket = generator.submit([5, 6, 7], params, adapter="same-name")
    drained = generator.unload_adapter("same-name")
    generator.load_adapter("same-name", adapter_b)
    newer = generator.submit([5, 6, 7], params, adapter="same-name")
    drained.result(timeout=30)
    assert ticket.future.done()
    assert ticket.future.result().token_ids == expected.token_ids
    assert newer.future.result().token_ids == generator.generate([5, 6, 7], params, adapter="b").token_ids
    generator.unload_adapter("same-name").result(timeout=30)


async def test_reloading_under_load_fails_no_request(server: str, adapter_a: Path, adapter_b: Path) -> None:
    current = "live-v0"
    done = False
    statuses: list[int] = []
    served: set[str] = set()

    async def use(client: httpx.AsyncClient, number: int) -> None:
        while not done:
            body = {"model": current, "prompt": f"one two {number}", "max_tokens": 12, "ignore_eos": True}
            response = await client.post("/v1/completions", json=body)
            statuses.append(response.status_code)
            served.add(response.json()["model"])

    async with httpx.AsyncClient(base_url=server, timeout=30) as client:

        async def change(path: str, name: str, adapter: Path) -> None:
            answer = await client.post(path, json={"lora_name": name, "lora_path": str(adapter)})
            assert answer.status_code == 200, answer.text

        await change("/v1/load_lora_adapter", current, adapter_a)
        users = [asyncio.create_task(use(client, number)) for number in range(8)]
        for version in range(1, 9):
            name = f"live-v{version}"
            await change("/v1/load_lora_adapter", name, adapter_b if version % 2 else adapter_a)
            old, current = current, name
            await asyncio.sleep(0.05)
            await change("/v1/unload_lora_adapter", old, adapter_a)
        done = True
        await asyncio.gather(*users)
        await change("/v1/unload_lora_adapter", current, adapter_a)
    assert len(statuses) > 16 and set(statuses) == {200}
    assert len(served) >= 8
