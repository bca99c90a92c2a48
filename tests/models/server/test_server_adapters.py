"""The life cycle of adapters: what is loaded, what is refused, and reloading under load."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_model import write_adapter, write_model
from transformers import AutoModelForCausalLM

from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.generator.generator import Generator
from openhands_rl_plugin.models.generator.sequence import DecodingParams
from openhands_rl_plugin.models.server.app import running_server


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
    assert load(http, "policy-v000001", adapter_a).status_code == 200
    again = load(http, "policy-v000001", adapter_a)
    assert again.status_code == 400 and "has already been loaded" in again.json()["error"]["message"]
    body = {"model": "policy-v000001", "prompt": "one two", "max_tokens": 5, "temperature": 0}
    used, expected = (http.post("/v1/completions", json=body | {"model": m}).json() for m in (body["model"], "a"))
    assert used["choices"][0]["text"] == expected["choices"][0]["text"]
    assert [unload(http, "policy-v000001").status_code for _ in range(2)] == [200, 404]
    gone = http.post("/v1/completions", json=body)
    assert gone.status_code == 404 and "`policy-v000001` does not exist" in gone.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        *((name, None) for name in ("../evil", "a/b", "", "x" * 200, "tiny")),
        *(("x", path) for path in ("x" * 4000, "a\u0000b", "/proc/1/root/x", "")),
    ],
)
def test_names_and_paths_that_are_refused(http: httpx.Client, adapter_a: Path, name: str, path: str | None) -> None:
    response = load(http, name, adapter_a if path is None else path)
    assert response.status_code in ((400,) if path is None else (400, 404))
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
        *({"lora_alpha": 10**400}, {"r": 0}, {"alpha_pattern": {"q_proj": 7}}, {"option_of_tomorrow": 1}),
        {"init_lora_weights": "pissa"},  # the base weights that it belongs to are others
        *({"use_dora": True}, {"peft_type": "IA3"}, {"modules_to_save": ["lm_head"]}),
        {"r": 8},  # not the rank of the tensors, which is 4
    ],
    ids=lambda changes: "-".join(map(str, changes.items()))[:60] if isinstance(changes, dict) else None,
)
def test_a_config_of_another_adapter_is_refused_with_one_line(
    http: httpx.Client, adapter_a: Path, tmp_path: Path, changes: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    refused = load(http, "odd", edited_config(tmp_path / "odd", adapter_a, **changes))
    assert (refused.status_code, "\n" in refused.json()["error"]["message"]) == (400, False), refused.text
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    "options",
    [
        {"init_lora_weights": "gaussian", "unsloth_fixed": True, "lora_dropout": 0.1},
        {"init_lora_weights": "orthogonal", "use_rslora": True, "target_modules": "all-linear"},
        {"layers_to_transform": 0, "exclude_modules": ["k_proj", "layers.0.mlp.gate_proj"]},
    ],
    ids=str,
)
def test_an_adapter_is_served_as_peft_computes_it(
    http: httpx.Client, tiny_model: Path, tmp_path: Path, options: dict[str, object]
) -> None:
    own = {"unsloth_fixed": options.pop("unsloth_fixed", None)}
    write_adapter(tmp_path / "made", tiny_model, seed=3, **options)
    path = edited_config(tmp_path / "kind", tmp_path / "made", **own)
    ids = list(range(10, 40))
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    logits = PeftModel.from_pretrained(base, path)(torch.tensor([ids])).logits[0, :-1]
    wanted = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert load(http, "kind", path).status_code == 200
    body = {"model": "kind", "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
    found = http.post("/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"]
    unload(http, "kind")
    served = [found[at][str(ids[at])]["logprob"] for at in range(1, len(ids))]
    assert served == pytest.approx(wanted.tolist(), abs=1e-3)


def test_requests_in_flight_finish_on_their_version(generator: Generator, adapter_a: Path, adapter_b: Path) -> None:
    params = DecodingParams(temperature=0, max_tokens=60, ignore_eos=True)
    expected = generator.generate([5, 6, 7], params, adapter="a")
    generator.load_adapter("same-name", adapter_a)
    ticket = generator.submit([5, 6, 7], params, adapter="same-name")
    with ThreadPoolExecutor(1) as pool:
        unloading = pool.submit(generator.unload_adapter, "same-name")
        while any(each.name == "same-name" for each in generator.adapters):
            pass
        generator.load_adapter("same-name", adapter_b)
        newer = generator.submit([5, 6, 7], params, adapter="same-name")
        unloading.result(timeout=30)
    assert ticket.done()
    assert ticket.result().token_ids == expected.token_ids
    assert newer.result().token_ids == generator.generate([5, 6, 7], params, adapter="b").token_ids
    generator.unload_adapter("same-name")


def test_a_server_starts_with_the_versions_in_use(
    tiny_model: Path, adapter_a: Path, adapter_b: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = write_adapter(tmp_path / "made", write_model(tmp_path / "other", hidden_size=32), seed=1)
    store = AdapterStore("adapters")
    for name, path in (("policy", adapter_a), ("policy", adapter_b), ("another-model", other), ("unused", adapter_a)):
        store.create(
            name, lambda folder, path=path: shutil.copytree(path, folder, dirs_exist_ok=True), base_model="tiny"
        )
    store.point(store.versions("policy")[0])
    store.point(store.versions("another-model")[0])
    (tmp_path / "tiny").symlink_to(tiny_model)
    (tmp_path / "adapters/linked").symlink_to(adapter_a)
    config = ServerConfig(model="tiny", served_model_name="base", port=0, threads=1, adapters="adapters")
    with running_server(config) as url, httpx.Client(base_url=url, timeout=60) as http:
        cards = http.get("/v1/models").json()["data"]
        for away in (adapter_a, "../made", "linked", "unused-v000001/../../made", tmp_path / "adapters-of-others", "/"):
            answer = load(http, "away", away)
            message = answer.json()["error"]["message"]
            assert answer.status_code == 400 and f"is not below {tmp_path / 'adapters'}, the only folder" in message
        assert load(http, "below", "unused-v000001").is_success
    roots = {"base": str(tmp_path / "tiny"), "policy-v000001": str(tmp_path / "adapters/policy-v000001")}
    assert {card["id"]: card["root"] for card in cards} == roots
