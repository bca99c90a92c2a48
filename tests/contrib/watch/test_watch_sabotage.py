"""Weights that are not those that were trained, whatever happened to them: the canary holds each of them back."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
import torch
from damage import DAMAGE
from watched import Killed, current, journal_of, look, play, watching, watching_folder, write_config

from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.contrib.watch.journal import CANARY, WatchStep
from openhands_rl_plugin.contrib.watch.service import Watch
from openhands_rl_plugin.models.adapters.store import AdapterStore


class UntilTrained(Watch):
    """Dies when a candidate is trained."""

    def _note(self, step: WatchStep, said: str, **more: object) -> None:
        super()._note(step, said, **more)  # type: ignore[arg-type]
        if step is WatchStep.TRAINED:
            raise Killed


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
    for kind, damage in [*DAMAGE.items(), ("untouched", lambda version: None)]:
        torch.manual_seed(0)
        assert current(settings) is None
        for place in places:
            shutil.rmtree(place)
            shutil.copytree(tmp_path / "kept" / place.name, place)
        damage(Path(version.path))
        asyncio.run(look(chosen, shopper))
        (end, *_) = journal_of(chosen)[before:]
        ends[kind] = str(end.figures.get("gate")) if end.step is WatchStep.HELD else f"{end.step}: {end.said}"
        print(f"{kind}: {end.said}")
    assert ends.pop("untouched").startswith(f"{WatchStep.PASSED}: ") and current(settings) == version.name
    assert ends == dict.fromkeys(DAMAGE, CANARY)
