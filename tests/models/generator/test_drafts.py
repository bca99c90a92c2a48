"""Tokens that are guessed ahead: they make answers faster, and never other ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import write_model

from openhands_rl_plugin.models.generator.config import GeneratorConfig
from openhands_rl_plugin.models.generator.drafts import Draft, SharedForms
from openhands_rl_plugin.models.generator.errors import GenerationFailed
from openhands_rl_plugin.models.generator.generator import Generator
from openhands_rl_plugin.models.generator.sampling import DecodingParams, RandomNumbers
from openhands_rl_plugin.models.generator.sequence import Delta

LENGTH = 40
PROMPT = tuple((i * 37) % 400 + 3 for i in range(30))
# The tiny model is all but uniform at temperature 1, and says the same again and again when cold.
ASKED = [
    DecodingParams(max_tokens=LENGTH, temperature=temperature, seed=seed, ignore_eos=True, **others)
    for seed, (temperature, others) in enumerate(
        [(0.0, {}), (0.02, {}), (0.05, {"top_p": 0.9}), (0.1, {"top_k": 3}), (0.05, {"min_p": 0.1}), (1.0, {})]
    )
]


@pytest.fixture(scope="module")
def generator(tiny_model: Path, adapter_a: Path) -> Iterator[Generator]:
    """It guesses up to eight tokens."""
    config = GeneratorConfig(model=str(tiny_model), dtype="float32", threads=1, max_batch=8, draft_tokens=8)
    with Generator(config) as generator:
        generator.load_adapter("a", adapter_a)
        yield generator


@pytest.fixture(scope="module")
def plain(tiny_model: Path, adapter_a: Path) -> Iterator[Generator]:
    """It guesses nothing."""
    config = GeneratorConfig(model=str(tiny_model), dtype="float32", threads=1, max_batch=8)
    with Generator(config) as generator:
        generator.load_adapter("a", adapter_a)
        yield generator


@pytest.mark.parametrize("adapter", [None, "a"])
def test_answers_are_those_of_a_server_that_guesses_nothing(
    generator: Generator, plain: Generator, adapter: str | None
) -> None:
    before = generator.guesses[1]
    for turn in range(3):  # what was said once is what is guessed then
        asked = [replace(each, seed=(each.seed or 0) + 10 * (turn // 2)) for each in ASKED]
        handles = [generator.submit(PROMPT, each, adapter=adapter) for each in asked]
        found = [handle.future.result(60) for handle in handles]
        for params, answer in zip(asked, found, strict=True):
            expected = plain.generate(PROMPT, params, adapter=adapter)
            assert answer.token_ids == expected.token_ids
            assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert generator.guesses[1] - before > LENGTH and plain.guesses == (0, 0)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("mistral", {"sliding_window": 8}), ("llama", {"num_key_value_heads": 4}), ("qwen3", {})],
)
def test_other_architectures(tmp_path: Path, model_type: str, changes: dict[str, object]) -> None:
    """Beside prompts that are still read, from one token on, and with scores of the prompt."""
    path = str(write_model(tmp_path / model_type, model_type=model_type, **changes))
    scored = replace(ASKED[1], prompt_logprobs=1)
    asked = [(PROMPT[:length], params) for params in (*ASKED[:3], scored) for length in (1, 12, 30)]
    with Generator(GeneratorConfig(model=path, dtype="float32", threads=1, prefill_tokens=16)) as plain:
        expected = [plain.generate(*each) for each in asked]
    config = GeneratorConfig(model=path, dtype="float32", threads=1, prefill_tokens=16, draft_tokens=8)
    with Generator(config) as generator:
        for _ in range(2):
            handles = [generator.submit(*each) for each in asked]
            for handle, other in zip(handles, expected, strict=True):
                answer = handle.future.result(60)
                assert answer.token_ids == other.token_ids
                assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-4)
                assert [each and each.token for each in answer.prompt or ()] == [
                    each and each.token for each in other.prompt or ()
                ]
        assert generator.guesses[1] > LENGTH


def test_guesses_that_are_wrong_change_nothing(
    generator: Generator, plain: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Draft, "following", lambda _, ids, most: [(ids[-1] + at) % 400 for at in range(min(most, 8))])
    before = generator.guesses
    handles = [generator.submit(PROMPT, params) for params in ASKED]
    for params, handle in zip(ASKED, handles, strict=True):
        assert handle.future.result(60).token_ids == plain.generate(PROMPT, params).token_ids
    drafted, accepted = (after - then for after, then in zip(generator.guesses, before, strict=True))
    assert drafted > 5 * LENGTH and accepted < drafted / 10


def test_an_answer_ends_where_it_would_have_ended(generator: Generator, plain: Generator) -> None:
    """In the middle of what was guessed: at a stop token, at a text, at the last token that is allowed."""
    cold = DecodingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    whole = plain.generate(PROMPT, cold)
    for _ in range(2):
        generator.generate(PROMPT, cold)
    for at in (3, 11, 17, LENGTH - 1):
        short = replace(cold, max_tokens=at)
        assert generator.generate(PROMPT, short).token_ids == whole.token_ids[:at]
        stopped = replace(cold, stop_token_ids=(whole.token_ids[at],))
        expected = plain.generate(PROMPT, stopped)
        found = generator.generate(PROMPT, stopped)
        assert (found.token_ids, found.stop_reason) == (expected.token_ids, expected.stop_reason)
    text = plain.tokenizer.decode([whole.token_ids[13]])
    expected, found = (each.generate(PROMPT, replace(cold, stop=(text,))) for each in (plain, generator))
    assert (found.token_ids, found.text) == (expected.token_ids, expected.text)


def test_a_conversation_goes_on_from_a_guess_that_was_cut(generator: Generator, plain: Generator) -> None:
    """Keys and values of tokens that were guessed wrong are neither used nor kept for others."""
    cold = DecodingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    for _ in range(2):
        generator.generate(PROMPT, cold)
    first = generator.generate(PROMPT, replace(cold, max_tokens=21))
    longer = (*PROMPT, *first.token_ids, 9, 8, 7)
    assert generator.generate(longer, cold).token_ids == plain.generate(longer, cold).token_ids


def test_each_token_is_streamed(generator: Generator) -> None:
    cold = DecodingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    for _ in range(2):
        deltas: list[Delta] = []
        handle = generator.submit(PROMPT, cold, on_delta=deltas.append)
        answer = handle.future.result(60)
        assert tuple(each for delta in deltas for each in delta.sampled) == answer.sampled
        assert [len(delta.sampled) for delta in deltas] == [1] * LENGTH


def test_a_listener_that_fails_within_a_guess_ends_its_own_sequence_only(generator: Generator) -> None:
    cold = DecodingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    seen: list[Delta] = []

    def broken(delta: Delta) -> None:
        seen.append(delta)
        if len(seen) == 20:
            raise ZeroDivisionError

    expected = generator.generate(PROMPT, cold)
    failed, other = generator.submit(PROMPT, cold, on_delta=broken), generator.submit(PROMPT, cold)
    with pytest.raises(GenerationFailed):
        failed.future.result(60)
    assert other.future.result(60).token_ids == expected.token_ids and len(seen) == 20


tokens = st.lists(st.integers(0, 9), min_size=5, max_size=30)


def learnt(forms: SharedForms, text: list[int]) -> None:
    for end in range(1, len(text) + 1):
        forms.learn(text[:end])


@given(tokens, st.integers(0, 8))
def test_what_two_answers_began_alike_is_guessed_for_a_third(text: list[int], most: int) -> None:
    forms = SharedForms()
    # Numbers that do not occur again: what follows any four of them is the same each time.
    form = [100 * at + token for at, token in enumerate(text)]
    learnt(forms, form)
    assert forms.following(form[:4], most) == []
    learnt(forms, form)
    assert forms.following(form[:4], most) == form[4 : 4 + most]


def test_what_differs_between_answers_is_not_guessed() -> None:
    forms = SharedForms()
    for name in (50, 51, 52, 53):
        learnt(forms, [1, 2, 3, 4, 5, name, 7, 8, 9, 10, 11])
    assert forms.following([1, 2, 3, 4], 8) == [5]
    assert forms.following([7, 8, 9, 10], 8) == [11]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(-1, 8))
def test_guesses_from_its_own_text_followed_the_same_tokens_before(text: list[int], most: int) -> None:
    draft = Draft(SharedForms(), 8)
    for end in range(1, len(text) + 1):
        guessed = draft.following(text[:end], most)
        assert len(guessed) <= max(most, 0)
        if guessed:
            gram, size = text[end - 3 : end], len(guessed)
            places = [at for at in range(3, end) if text[at - 3 : at] == gram]
            assert guessed == text[places[-1] : places[-1] + size][:size]


def test_who_guesses_wrong_guesses_less() -> None:
    draft = Draft(SharedForms(), 8)
    again = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1, 2, 3]
    assert len(draft.following(again, 99)) == 4
    draft.checked(4, 4)
    assert len(draft.following(again, 99)) == 8
    draft.checked(8, 0)
    assert len(draft.following(again, 99)) == 1
    for _ in range(3):
        draft.checked(0, 0)
    assert len(draft.following(again, 99)) == 4


def test_numbers_that_were_not_used_come_again() -> None:
    one, other = RandomNumbers(5), RandomNumbers(5)
    expected = [one.draw().item() for _ in range(6)]
    assert [other.draw().item() for _ in range(4)] == expected[:4]
    other.keep(2)
    assert [other.draw().item() for _ in range(3)] == expected[2:5]
    other.keep(0)
    assert [other.draw().item() for _ in range(4)] == expected[2:]
