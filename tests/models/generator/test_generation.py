"""The generation core against the original model: equal tokens and logprobs, however requests are batched."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tiny_model import write_model
from transformers import AutoModelForCausalLM

from openhands_rl_plugin.models.generator.config import GenerationFailed, GeneratorConfig, StartError
from openhands_rl_plugin.models.generator.generator import Generator
from openhands_rl_plugin.models.generator.sequence import DecodingParams, Generation

pytestmark = pytest.mark.contract

GREEDY = DecodingParams(temperature=0, max_tokens=12, ignore_eos=True)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(i * 31 + 7 * salt + i * i) % 500 + 2 for i in range(length)]


@torch.inference_mode()
def reference(
    model: Path, ids: Sequence[int], count: int, adapter: Path | None = None
) -> tuple[list[int], list[float]]:
    """Greedy tokens and their logprobs from plain transformers and PEFT, the whole text each time."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    plain = PeftModel.from_pretrained(plain, adapter).eval() if adapter else plain
    tokens, logprobs, ids = [], [], list(ids)
    for _ in range(count):
        distribution = plain(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
        ids.append(int(distribution.argmax()))
        tokens.append(ids[-1])
        logprobs.append(float(distribution.max()))
    return tokens, logprobs


def same(one: Generation, other: Generation) -> None:
    assert one.token_ids == other.token_ids
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("adapter", [None, "a", "b"])
def test_greedy_equals_the_original_model(
    generator: Generator, tiny_model: Path, adapter: str | None, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(f"adapter_{adapter}") if adapter else None
    tokens, logprobs = reference(tiny_model, prompt(37), 12, path)
    answer = generator.generate(prompt(37), GREEDY, adapter=adapter)
    assert list(answer.token_ids) == tokens
    assert answer.logprobs == pytest.approx(logprobs, abs=1e-4)
    assert answer.finish_reason == "length"
    assert (answer.adapter and answer.adapter.name) == adapter


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("qwen2", {}), ("qwen3", {}), ("mistral", {"sliding_window": 8}), ("llama", {"num_key_value_heads": 4})],
)
def test_other_architectures(tmp_path: Path, model_type: str, changes: dict[str, object]) -> None:
    path = write_model(tmp_path / model_type, model_type=model_type, **changes)
    config = GeneratorConfig(model=str(path), dtype="float32", threads=1, prefill_tokens=16)
    tokens, logprobs = reference(path, prompt(45), 12)
    with Generator(config) as generator:
        answer = generator.generate(prompt(45), GREEDY)
    assert list(answer.token_ids) == tokens
    assert answer.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_an_architecture_with_other_attention_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "gpt_oss", model_type="gpt_oss", num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(StartError, match="cannot be served"):
        Generator(GeneratorConfig(model=str(path), dtype="float32", threads=1))


def test_adapters_mixed_in_one_batch_equal_alone(generator: Generator) -> None:
    wanted = [(n, adapter) for n in (5, 40, 21) for adapter in ("a", None, "b")]
    alone = [generator.generate(prompt(n), GREEDY, adapter=adapter) for n, adapter in wanted]
    tickets = [generator.submit(prompt(n), GREEDY, adapter=adapter) for n, adapter in wanted]
    for ticket, expected in zip(tickets, alone, strict=True):
        same(ticket.result(), expected)
    assert len({answer.token_ids for answer in alone[:3]}) == 3


def test_a_conversation_reuses_what_was_computed(generator: Generator) -> None:
    first = generator.generate(prompt(50, 9), GREEDY, adapter="a")
    assert first.cached_tokens == 0
    longer = [*first.prompt_ids, *first.token_ids, *prompt(20, 4)]
    again = generator.generate(longer, GREEDY, adapter="a")
    assert again.cached_tokens >= 48
    other = generator.generate(longer, GREEDY, adapter="b")
    assert other.cached_tokens == 0
    with Generator(generator.config.model_copy(update={"cache_bytes": 0, "prefill_tokens": 16})) as uncached:
        uncached.load_adapter("a", Path(next(a.path for a in generator.adapters if a.name == "a")))
        fresh = uncached.generate(longer, GREEDY, adapter="a")
    assert fresh.cached_tokens == 0
    same(again, fresh)


def test_equal_prompts_together_are_computed_once(generator: Generator) -> None:
    tickets = [generator.submit(prompt(100, 77), GREEDY) for _ in range(4)]
    answers = [ticket.result() for ticket in tickets]
    assert sorted(answer.cached_tokens for answer in answers) == [0, 96, 96, 96]
    assert len({answer.token_ids for answer in answers}) == 1


def test_the_cache_keeps_to_its_bound(tiny_model: Path) -> None:
    # 2 layers x keys and values x 2 heads x 16 x 4 bytes = 512 bytes a token; room for three blocks of 16.
    config = GeneratorConfig(model=str(tiny_model), dtype="float32", threads=1, cache_bytes=3 * (16 * 512 + 2048))
    with Generator(config) as generator:
        for salt in range(4):
            generator.generate(prompt(40, salt), DecodingParams(max_tokens=1))
        latest = generator.generate(prompt(40, 3), DecodingParams(max_tokens=1))
        oldest = generator.generate(prompt(40, 0), DecodingParams(max_tokens=1))
    assert latest.cached_tokens == 32
    assert oldest.cached_tokens == 0


def test_a_seed_fixes_the_answer_in_any_batch(generator: Generator) -> None:
    params = DecodingParams(temperature=1.3, top_p=0.95, max_tokens=20, seed=5, ignore_eos=True)
    alone = generator.generate(prompt(30), params)
    tickets = [generator.submit(prompt(30, i), replace(params, seed=i), adapter=["a", None][i % 2]) for i in range(6)]
    again = generator.submit(prompt(30), params)
    same(again.result(), alone)
    assert len({ticket.result().token_ids for ticket in tickets}) == 6
    assert generator.generate(prompt(30), replace(params, seed=6)).token_ids != alone.token_ids


def test_logprobs_are_of_the_models_own_distribution(generator: Generator, tiny_model: Path) -> None:
    params = DecodingParams(temperature=2, top_k=5, top_p=0.9, max_tokens=6, seed=3, top_logprobs=3, ignore_eos=True)
    answer = generator.generate(prompt(150), replace(params, prompt_logprobs=1))
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.inference_mode():
        logits = plain(torch.tensor([[*answer.prompt_ids, *answer.token_ids]])).logits[0].float()
    expected = logits.log_softmax(-1)
    assert answer.prompt is not None and len(answer.prompt) == 150 and answer.prompt[0] is None
    for at, one in enumerate([*answer.prompt[1:], *answer.sampled]):
        assert one is not None and one.token == (*answer.prompt_ids, *answer.token_ids)[at + 1]
        assert one.logprob == pytest.approx(float(expected[at, one.token]), abs=1e-3)
        top = expected[at].topk(len(one.top))
        assert [token for token, _ in one.top] == top.indices.tolist()
        assert [logprob for _, logprob in one.top] == pytest.approx(top.values.tolist(), abs=1e-3)
        assert one.rank == (0 if at >= 149 else int((expected[at] > expected[at, one.token]).sum()) + 1)


def test_stop_strings_are_cut_and_their_tokens_reported(generator: Generator) -> None:
    whole = generator.generate(prompt(25), DecodingParams(temperature=0, max_tokens=30, ignore_eos=True))
    stop = whole.text[6:9]
    deltas: list[str] = []
    params = DecodingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=(stop, "never there"))
    ticket = generator.submit(prompt(25), params, on_delta=lambda _, text: deltas.append(text))
    answer = ticket.result()
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert answer.finish_reason == "stop" and answer.stop_reason == stop
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)] and len(answer.token_ids) < 30
    assert "".join(deltas) == answer.text


def test_the_memory_of_the_slots_bounds_the_context(tiny_model: Path) -> None:
    # 2 layers x 256 slots x 2 heads x 16 x (4 + 4) bytes = 128 KiB for each token of all slots.
    config = GeneratorConfig(model=str(tiny_model), dtype="float32", threads=1, max_batch=256, kv_bytes=16 * 2**20)
    with Generator(config) as generator:
        assert generator.max_model_len == 128


LENGTH = 24
HONEST = [DecodingParams(max_tokens=LENGTH, seed=seed, ignore_eos=True, top_p=0.9) for seed in range(4)]
IMPOSSIBLE = DecodingParams(max_tokens=LENGTH, top_logprobs=-1)


def test_a_step_that_fails_ends_its_sequences_and_later_ones_are_served(generator: Generator) -> None:
    alone = generator.generate((5, 6, 7), HONEST[0]).token_ids
    for _ in range(3):
        with pytest.raises(GenerationFailed, match="The generation failed"):
            generator.submit((8, 9), IMPOSSIBLE).result(30)
        assert generator.generate((5, 6, 7), HONEST[0]).token_ids == alone
    assert not generator.in_flight


def test_a_listener_that_fails_ends_its_own_sequence_only(generator: Generator) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    other, failed = generator.submit((5, 6), HONEST[0]), generator.submit((5, 6), HONEST[1], on_delta=broken)
    with pytest.raises(GenerationFailed):
        failed.result(30)
    assert len(other.result(30).token_ids) == LENGTH
