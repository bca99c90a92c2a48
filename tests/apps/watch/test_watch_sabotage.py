"""Weights that are not those that were trained, whatever happened to them: the canary holds each of them back."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from watched import Killed, current, journal_of, look, play, watching, watching_folder, write_config

from openhands_rl_plugin.apps.watch.gates import CANARY
from openhands_rl_plugin.apps.watch.journal import WatchStep
from openhands_rl_plugin.apps.watch.service import Watch
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.models.adapters.store import MANIFEST, WEIGHTS_FILE, AdapterStore, weights_sha256

type Tensors = dict[str, torch.Tensor]


class UntilTrained(Watch):
    """Dies when a candidate is trained."""

    def _note(self, step: WatchStep, said: str, **more: object) -> None:
        super()._note(step, said, **more)  # type: ignore[arg-type]
        if step is WatchStep.TRAINED:
            raise Killed


def signed(version: Path) -> None:
    """The manifest names the weights as they are now, as if they had been written so."""
    manifest = json.loads((version / MANIFEST).read_text())
    (version / MANIFEST).write_text(json.dumps({**manifest, "sha256": weights_sha256(version)}))


def weights(change: Callable[[Tensors], Tensors]) -> Callable[[Path], None]:
    def sabotage(version: Path) -> None:
        changed = change(load_file(version / WEIGHTS_FILE))
        save_file({name: each.contiguous() for name, each in changed.items()}, version / WEIGHTS_FILE)
        signed(version)

    return sabotage


def config(**values: object) -> Callable[[Path], None]:
    def sabotage(version: Path) -> None:
        file = version / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return sabotage


def cut(version: Path) -> None:
    file = version / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flipped(version: Path) -> None:
    content = bytearray((version / WEIGHTS_FILE).read_bytes())
    content[-100] ^= 0x40
    (version / WEIGHTS_FILE).write_bytes(content)


def cut_and_signed(version: Path) -> None:
    cut(version)
    signed(version)


def each(of: Callable[[str, torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return weights(lambda tensors: {name: of(name, tensor) for name, tensor in tensors.items()})


SABOTAGE: dict[str, Callable[[Path], None]] = {
    "the file is cut short": cut,
    "a bit is flipped": flipped,
    "the file is gone": lambda version: (version / WEIGHTS_FILE).unlink(),
    "cut short before it was signed": cut_and_signed,
    "not a number": each(lambda name, tensor: torch.full_like(tensor, float("nan"))),
    "infinite": each(lambda name, tensor: torch.full_like(tensor, float("inf"))),
    "zeros": each(lambda name, tensor: torch.zeros_like(tensor)),
    "random, of a big norm": each(lambda name, tensor: 10 * torch.randn_like(tensor)),
    "the other way round": each(lambda name, tensor: -tensor if "lora_B" in name else tensor),
    "a hundred times as large": each(lambda name, tensor: 100 * tensor if "lora_B" in name else tensor),
    "of a wider base model": each(lambda name, tensor: torch.cat([tensor, tensor], dim=1 if "lora_A" in name else 0)),
    "of another base model's layers": weights(
        lambda tensors: {name.replace("layers.0", "layers.70"): tensor for name, tensor in tensors.items()}
    ),
    "another lora_alpha": config(lora_alpha=512),
    "a rank that is not its own": config(r=64),
    "no adapter_config.json": lambda version: (version / "adapter_config.json").unlink(),
}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_sabotage_of_the_weights_is_held_back_by_the_canary(
    served: tuple[str, str], shopper: Path, tmp_path: Path
) -> None:
    chosen = write_config(tmp_path, shop=served[0], server=served[1])
    settings = load_settings(chosen)
    asyncio.run(play(settings, "users", 16))

    async def trained() -> None:
        async with watching(chosen, shopper, kind=UntilTrained) as watch:
            with pytest.raises(Killed):
                await watch.look()

    asyncio.run(trained())
    (version,) = AdapterStore(settings.serving.adapters_directory).versions(settings.serving.adapter)
    before = len(journal_of(chosen))
    places = [Path(version.path), watching_folder(settings)]
    for place in places:
        shutil.copytree(place, tmp_path / "kept" / place.name)
    ends: dict[str, str] = {}
    for kind, sabotage in [*SABOTAGE.items(), ("untouched", lambda version: None)]:
        torch.manual_seed(0)
        assert current(settings) is None
        for place in places:
            shutil.rmtree(place)
            shutil.copytree(tmp_path / "kept" / place.name, place)
        sabotage(Path(version.path))
        asyncio.run(look(chosen, shopper))
        (end, *_) = journal_of(chosen)[before:]
        ends[kind] = str(end.figures.get("gate")) if end.step is WatchStep.HELD else f"{end.step}: {end.said}"
        print(f"{kind}: {end.said}")
    assert ends.pop("untouched").startswith(f"{WatchStep.PASSED}: ") and current(settings) == version.name
    assert ends == dict.fromkeys(SABOTAGE, CANARY)
