"""The sides of ``gpu``: the same random model with the same adapter layers, by this project's trainer and by TRL's."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.training.losses.losses import MicroBatch, Reinforcement
from openhands_rl_plugin.training.losses.micro_batches import samples_from_rollouts
from openhands_rl_plugin.training.policies.lora_policy import TrainablePolicy
from openhands_rl_plugin.training.trainer.preparation import micro_batch_logprobs

SHAPES: dict[str, dict[str, Any]] = {
    "1.2B": {  # of Llama 3.2 1B
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    },
}
SETTINGS = TrainingSettings(dtype="bfloat16", lora_rank=16, lora_alpha=32, gradient_checkpointing=True)


def random_model(shape: str, device: torch.device) -> PreTrainedModel:
    """A Llama in bfloat16, made on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPES[shape]), dtype=torch.bfloat16)


class RandomPolicy(TrainablePolicy):
    """This project's policy on a model that is in no directory."""

    def _open(self) -> PreTrainedModel:
        model = random_model(self.model_path, self.device)
        return model.eval().requires_grad_(False)


class Ours:
    """All sequences of a step in one packed pass; the loss is ``[rl.training]``'s default, as in the trainer."""

    name = "this project"

    def __init__(self, shape: str) -> None:
        self.policy = RandomPolicy(shape, SETTINGS)
        self.parameters = list(self.policy.parameters.values())
        self._loss = Reinforcement(SETTINGS)

    def step(self, samples: Sequence[Sample]) -> float:
        """Forward and backward of ``samples``; returns the loss."""
        items = samples_from_rollouts(samples)
        logprobs, entropies = micro_batch_logprobs(self.policy, items)
        weights = self._loss.weights(items).to(logprobs.device)
        loss, _ = self._loss(MicroBatch(items, logprobs, entropies, weights))
        loss.backward()
        return loss.item()


class Trl:
    """TRL's ``GRPOTrainer.compute_loss``: its own fused output layer, transformers' attention, batches of sequences of
    one length, so that nothing is padded. ``tokens``: of a batch; a step with more is several batches."""

    def __init__(self, shape: str, device: torch.device, tokens: int) -> None:
        from datasets import Dataset
        from peft import LoraConfig
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.grpo_trainer import GRPOTrainer

        self._tokens, self._device = tokens, device
        flash = find_spec("flash_attn") is not None
        self.attention = "flash_attention_2" if flash else "sdpa"
        self.name = f"TRL {version('trl')}, {self.attention}"
        model = random_model(shape, device)
        model.set_attn_implementation(self.attention)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")), pad_token="b", eos_token="b"
        )
        with tempfile.TemporaryDirectory() as directory:
            self._trainer = GRPOTrainer(
                model=model,
                reward_funcs=lambda **_: [0.0],
                args=GRPOConfig(
                    output_dir=directory,
                    per_device_train_batch_size=2,
                    num_generations=2,
                    beta=0.0,
                    bf16=True,
                    use_cpu=device.type == "cpu",
                    gradient_checkpointing=True,
                    gradient_checkpointing_kwargs={"use_reentrant": False},
                    report_to="none",
                    save_strategy="no",
                    disable_tqdm=True,
                ),
                train_dataset=Dataset.from_dict({"prompt": ["", ""]}),
                processing_class=tokenizer,
                peft_config=LoraConfig(
                    task_type="CAUSAL_LM",
                    r=SETTINGS.lora_rank,
                    lora_alpha=SETTINGS.lora_alpha,
                    lora_dropout=0.0,
                    target_modules=list(SETTINGS.target_modules),
                ),
            )
        self._trainer.current_gradient_accumulation_steps = 1  # its loop says so
        self.model: nn.Module = self._trainer.accelerator.prepare(self._trainer.model)
        self.model.train()
        self.parameters = [each for each in self.model.parameters() if each.requires_grad]

    def step(self, samples: Sequence[Sample]) -> float:
        """Forward and backward of ``samples``; returns the loss."""
        size = max(1, self._tokens // len(samples[0].input_ids))
        total = 0.0
        for at in range(0, len(samples), size):
            loss = self._trainer.compute_loss(self.model, self._inputs(samples[at : at + size], len(samples)))
            self._trainer.accelerator.backward(loss)
            total += loss.item()
        return total

    def _inputs(self, samples: Sequence[Sample], count: int) -> dict[str, Tensor]:
        start = samples[0].mask.index(True)
        ids = torch.tensor([sample.input_ids for sample in samples], device=self._device)
        prompt, completion = ids[:, :start], ids[:, start:]
        trained = count * completion.shape[1]
        return {
            "prompt_ids": prompt,
            "prompt_mask": torch.ones_like(prompt),
            "completion_ids": completion,
            "completion_mask": torch.ones_like(completion),
            "advantages": torch.tensor([sample.advantage for sample in samples], device=self._device),
            "num_items_in_batch": torch.tensor(float(trained), device=self._device),
        }
