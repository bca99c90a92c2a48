"""A verifier scoring n attempts at one task: ``python -m evaluation.performance.serving.verifier --model PATH``.

The prompts share a prefix (the question, the agent's system message, the instruction, common turns) and then
differ. Three ways, by turns: all together, where a common beginning is computed once; the same model with each
prompt alone; transformers and PEFT with each prompt alone. Every share of the prompt that is common is measured on its
own: two long attempts may have no more in common than a quarter, the candidates of one turn nearly everything. Prints
medians, ratios and the largest difference of the scores. The adapter is random; what is computed does not depend on it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from openhands_rl_plugin.models.generator.threads import prepare_threads

prepare_threads()

import torch  # noqa: E402  (the thread settings are read when torch loads)
from peft import PeftModel  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from evaluation.performance.serving.random_weights import AdapterWriter, tiny_model  # noqa: E402
from openhands_rl_plugin.rewards.verifier.card import VerifierCard  # noqa: E402
from openhands_rl_plugin.rewards.verifier.prompt import prompts_for  # noqa: E402
from openhands_rl_plugin.rewards.verifier.training import VerifierModel, weights_sha256  # noqa: E402

Prompt = tuple[int, ...]
Way = Callable[[Sequence[Prompt]], list[float]]


def attempts(count: int, length: int, share: float, vocabulary: int, seed: int) -> list[Prompt]:
    """Prompts of one length, of which ``share`` is the same in all."""
    source = random.Random(seed)

    def some(tokens: int) -> Prompt:
        return tuple(source.randrange(vocabulary) for _ in range(tokens))

    common = some(round(length * share))
    return [common + some(length - len(common)) for _ in range(count)]


def ways(model: Path, scratch: Path) -> tuple[dict[str, Way], int]:
    """The ways to score, by name, and the size of the vocabulary."""
    adapter = AdapterWriter(model, scratch).write("verifier")
    prompts = prompts_for(str(model), 2**20)
    known = {"model": str(model), "sha256": weights_sha256(adapter), "max_length": prompts.max_length}
    card = VerifierCard.model_validate({**known, "yes": prompts.yes, "no": prompts.no, "trained_on": ()})
    card.save(adapter)
    verifier = VerifierModel(adapter)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=verifier.dtype, local_files_only=True)
    plain = PeftModel.from_pretrained(base, str(adapter)).eval()

    def together(asked: Sequence[Prompt]) -> list[float]:
        return [verdict.margin for verdict in verifier.judge(asked)]

    def alone(asked: Sequence[Prompt]) -> list[float]:
        return [verifier.judge([prompt])[0].margin for prompt in asked]

    @torch.inference_mode()
    def transformers_alone(asked: Sequence[Prompt]) -> list[float]:
        margins = []
        for prompt in asked:
            logits = plain(input_ids=torch.tensor([prompt]), use_cache=False, logits_to_keep=1).logits[0, -1].float()
            margins.append((logits[card.yes] - logits[card.no]).item())
        return margins

    return {"together": together, "alone": alone, "transformers alone": transformers_alone}, verifier.vocabulary


def measure(found: dict[str, Way], vocabulary: int, options: argparse.Namespace, share: float) -> dict[str, float]:
    """Median seconds of each way, ratios, and the largest difference in nats."""
    seconds: dict[str, list[float]] = {name: [] for name in found}
    difference = 0.0
    # The first round warms up and is not counted.
    for repeat in range(options.repeats + 1):
        asked = attempts(options.attempts, options.length, share, vocabulary, repeat)
        if repeat == 0:
            asked = [prompt[:64] for prompt in asked]
        margins: dict[str, list[float]] = {}
        for name, way in found.items():
            started = time.perf_counter()
            margins[name] = way(asked)
            if repeat:
                seconds[name].append(time.perf_counter() - started)
        others = [margins[name] for name in ("alone", "transformers alone")]
        difference = max(
            difference,
            *(abs(left - right) for other in others for left, right in zip(margins["together"], other, strict=True)),
        )
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {
        f"together against {name}": statistics.median(
            other / own for other, own in zip(seconds[name], seconds["together"], strict=True)
        )
        for name in ("alone", "transformers alone")
    }
    return medians | ratios | {"largest difference": difference}


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of a Hugging Face model (default: a tiny random one)")
    parser.add_argument("--attempts", type=int, default=8)
    parser.add_argument("--length", type=int, default=768, help="tokens of each prompt (default: 768)")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5], help="of the prompt that are common")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="verifier-benchmark-") as scratch:
        model = options.model or tiny_model(Path(scratch) / "model")
        found, vocabulary = ways(model, Path(scratch))
        for share in options.shares:
            figures[f"{share:g}"] = measured = measure(found, vocabulary, options, share)
            print(f"{options.attempts} prompts of {options.length} tokens, {share:.0%} of each common to all:")
            for name, value in measured.items():
                print(f"  {name}: {value:.3g}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
