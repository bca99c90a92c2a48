"""A candidate gets a share of the sessions by the gateway's routing file before it gets all of them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import pytest
from watched import ALL, current, journal_of, killed_all_the_time, label, look, play, watching, write_config

from openhands_rl_plugin import cli
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.contrib.watch.gates import SessionCounts, share_gate
from openhands_rl_plugin.contrib.watch.journal import WatchStep
from openhands_rl_plugin.contrib.watch.trouble import TROUBLES
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.gateway.traffic import Routing, TrafficSplit, read_routing

SHARED = [*ALL[:9], WatchStep.SHARED]


def routed(folder: Path, served: tuple[str, str]) -> tuple[Path, Path]:
    file = folder / "routing.json"
    watch = f'routing = "{file}"\nshare = 0.5\nshare_sessions = 3'
    config = write_config(folder, shop=served[0], server=served[1], watch=watch)
    config.write_text(config.read_text().replace("min_episodes = 8", "min_episodes = 15"))  # no second round
    return config, file


async def in_use(settings: RLSettings, file: Path, sessions: int, run: str = "use") -> dict[str | None, list[str]]:
    """Sessions of users, each with the version that a gateway would begin it with; version -> episodes."""
    split = TrafficSplit(file)
    versions = [split.begin(f"{run}-{at}") for at in range(sessions)]
    return {
        each: [t.id for t in await play(settings, f"{run}-{each}", versions.count(each), served=each)]
        for each in dict.fromkeys(versions)
    }


@pytest.mark.slow
def test_a_kill_at_any_line_leaves_a_routing_that_the_journal_explains(
    served: tuple[str, str], shopper: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, file = routed(tmp_path, served)
    settings = load_settings(config)
    seen: list[tuple[bool, Routing]] = []

    def died() -> None:
        entries = [each.step for each in journal_of(config)]
        seen.append((WatchStep.SHARED in entries, read_routing(file) if file.exists() else Routing()))

    asyncio.run(play(settings, "users", 16))
    deaths = asyncio.run(killed_all_the_time(config, shopper, died))
    assert [entry.step for entry in journal_of(config)] == SHARED and deaths == 2 * len(SHARED)
    assert all(routing == Routing() for shared, routing in seen if not shared), "nobody gets it before that line"
    (version,) = AdapterStore(settings.serving.adapters_directory).versions(settings.serving.adapter)
    assert read_routing(file) == Routing(candidate=version.name, share=0.5) and current(settings) is None
    capsys.readouterr()
    assert cli.main(["watch", "status", "--config", str(config)]) == 0
    assert "now: it gets a share of the new sessions since " in capsys.readouterr().out
    assert asyncio.run(look(config, shopper)) == [], "it waits for sessions"

    played = asyncio.run(in_use(settings, file, 14))
    assert {None, version.name} == played.keys() and min(map(len, played.values())) >= 3
    seen.clear()
    asyncio.run(killed_all_the_time(config, shopper, died))
    assert [entry.step for entry in journal_of(config)][10:] == [WatchStep.PASSED, WatchStep.ADMITTED, WatchStep.JUDGED]
    assert {routing.stable for _, routing in seen} <= {None, version.name}
    assert read_routing(file) == Routing(stable=version.name) and current(settings) == version.name
    assert "passed its share of the sessions" in journal_of(config)[10].said

    assert cli.main(["watch", "rollback", "--config", str(config)]) == 0
    assert read_routing(file) == Routing() and current(settings) is None
    assert cli.main(["watch", "rollback", "--config", str(config), "--to", "1"]) == 0
    assert read_routing(file) == Routing(stable=version.name)


@pytest.mark.slow
def test_a_candidate_that_does_worse_in_use_is_held_back_and_leaves_the_routing(
    served: tuple[str, str], shopper: Path, tmp_path: Path
) -> None:
    config, file = routed(tmp_path, served)
    settings = load_settings(config)
    asyncio.run(play(settings, "users", 16))
    assert [each.step for each in asyncio.run(look(config, shopper))] == SHARED
    candidate = read_routing(file).candidate
    where = ["--config", str(config)]
    assert cli.main(["watch", "pause", *where]) == 0
    asyncio.run(look(config, shopper))
    assert read_routing(file) == Routing(), "nobody looks at it during a pause"
    assert cli.main(["watch", "resume", *where]) == 0
    asyncio.run(look(config, shopper))
    assert read_routing(file).candidate == candidate

    played = asyncio.run(in_use(settings, file, 14))
    said = [(each, float(version is None), "ann") for version, ids in played.items() for each in ids]
    asyncio.run(label(settings, said))
    held = asyncio.run(look(config, shopper))
    assert held[0].step is WatchStep.HELD and "was held back by its share of the sessions: failures in" in held[0].said
    assert read_routing(file) == Routing() and current(settings) is None
    assert candidate is not None and candidate not in httpx.get(f"{served[1]}/v1/models").text


def test_too_few_sessions_in_the_time_hold_it_back_and_a_stop_or_a_rollback_takes_it_out(
    served: tuple[str, str], shopper: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, file = routed(tmp_path, served)
    settings = load_settings(config)
    asyncio.run(play(settings, "users", 16))

    async def stopped() -> None:
        async with watching(config, shopper) as watch:
            await watch.run(lambda: any(each.step is WatchStep.SHARED for each in journal_of(config)))

    asyncio.run(stopped())
    assert [each.step for each in journal_of(config)] == SHARED and read_routing(file) == Routing()
    asyncio.run(look(config, shopper))
    assert read_routing(file).candidate is not None
    shorter = tmp_path / "shorter.toml"
    shorter.write_text(config.read_text().replace("share_sessions = 3", "share_sessions = 3\nshare_hours = 1e-9"))
    time.sleep(0.01)
    (held, *_) = asyncio.run(look(shorter, shopper))
    assert "0 of its sessions and 0 of the others ended in share_hours = 1e-09, 3 are needed" in held.said
    assert read_routing(file) == Routing()

    file.write_text("notes of mine")
    words = ["watch", "--config", str(config), "--model", str(shopper), "--once", "--processes", "0"]
    capsys.readouterr()
    assert cli.main(words) == 1
    assert "routing.json: " in capsys.readouterr().err and file.read_text() == "notes of mine"
    file.unlink()
    nowhere = tmp_path / "nowhere.toml"
    nowhere.write_text(config.read_text().replace("routing.json", "away/routing.json"))
    assert cli.main([*words[:2], str(nowhere), *words[3:]]) == 1
    assert "routing: the folder " in capsys.readouterr().err


def counts(sessions: int, good: int = 0, judged: int = 0, **trouble: int) -> SessionCounts:
    return SessionCounts(sessions, {kind: trouble.get(kind.split()[0], 0) for kind in TROUBLES}, judged, good)


@pytest.mark.parametrize(
    ("after", "before", "early", "final"),
    [
        (counts(50), counts(450), True, True),
        (counts(50, stuck=5), counts(450, stuck=45), True, True),
        (counts(50, stuck=9), counts(450, stuck=30), True, False),
        (counts(50, stuck=25), counts(450, stuck=30), False, False),
        (counts(50, flagged=1), counts(450), True, False),
        (counts(1, stuck=1), counts(50), True, False),
        (counts(50, good=20, judged=50), counts(450, good=360, judged=450), False, False),
        (counts(50, good=40, judged=50), counts(450, good=360, judged=450), True, True),
        (counts(0), counts(0), True, True),
    ],
)
def test_what_chance_explains_holds_nothing_back(
    after: SessionCounts, before: SessionCounts, early: bool, final: bool
) -> None:
    assert share_gate("c", after, before, final=False).passed is early
    assert share_gate("c", after, before, final=True).passed is final
