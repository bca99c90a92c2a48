from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted_secrets import CLEAN, IN_TEXT, SHAPES

from evaluation.performance.secrets.planted import left_of, planted
from openhands_rl_plugin.core.errors import CaughtFailure, boundary, describe
from openhands_rl_plugin.core.records import EpisodeGrowth, EpisodeStart
from openhands_rl_plugin.core.redaction import (
    REDACTED,
    RedactingFilter,
    redact_json,
    redact_nodes,
    redact_text,
    redact_trajectory,
    redact_value,
    redacting_logger,
)
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    Completion,
    Failure,
    FailureKind,
    JsonObject,
    Message,
    Node,
    Observation,
    Score,
    Task,
    Tokens,
    ToolCall,
)
from openhands_rl_plugin.rollout.episode import EpisodeJournal
from openhands_rl_plugin.testing import example_trajectory
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

KEY = SHAPES["github"]
IDS = Tokens(prompt_ids=(1, 2), sampled_ids=(3,), logprobs=(-0.5,))


@pytest.mark.parametrize("secret", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("text", ["{}", "the key is {}, ok", "x={}\n", '"{}"', "({})", "https://x/{}/y"])
def test_a_key_of_a_known_shape_goes_wherever_it_stands(secret: str, text: str) -> None:
    assert redact_text(text.format(secret)) == text.format(REDACTED)


@pytest.mark.parametrize(("text", "secret"), IN_TEXT, ids=range(len(IN_TEXT)))
def test_a_secret_in_its_place_goes_and_the_rest_stays(text: str, secret: str) -> None:
    clean = redact_text(text)
    assert secret not in clean and REDACTED in clean
    start, _, end = text.partition(secret)
    assert clean.startswith(start[:-80]) and clean.endswith(end[80:])


@pytest.mark.parametrize(("text", "secret"), IN_TEXT, ids=range(len(IN_TEXT)))
def test_a_secret_in_text_that_is_a_json_string_goes_too(text: str, secret: str) -> None:
    written = redact_text(json.dumps({"content": text}))
    assert secret not in json.loads(written)["content"]


@pytest.mark.parametrize("text", CLEAN, ids=range(len(CLEAN)))
def test_ordinary_text_stays(text: str) -> None:
    assert redact_text(text) is text


PIECES = st.sampled_from([*SHAPES.values(), *(text for text, _ in IN_TEXT), *CLEAN, REDACTED, "\n", '"', "=", "A_KEY="])


@given(st.lists(PIECES | st.text(max_size=20), max_size=6).map("".join))
def test_redaction_is_idempotent_and_leaves_no_known_shape(text: str) -> None:
    clean = redact_text(text)
    assert redact_text(clean) == clean


def assert_takes_linear_time(head: str, piece: str) -> None:
    """Four times the text may take eight times as long, whatever the machine: with quadratic time it takes sixteen."""

    def seconds(length: int) -> float:
        text = head + piece * (length // len(piece))
        started = time.process_time()
        redact_text(text)
        return time.process_time() - started

    short = seconds(15_000)
    assert seconds(60_000) < max(0.5, 8 * short)


PIECES_IN_A_ROW = (
    *("key=", "API_KEY:aaaa", "secret='", "authorization: basic ", "bearer ", "key" + " " * 20, "KEY_1", "A1", "\\"),
    *("cookie:", "cookie: a=b;", ";user=a;pwd=aaaa", "--password ", "password='a b", "auth=YTpi", "?sig=", "pwd=1a;"),
    *("set -x A_KEY 1a", "auth=('a',", "key>1a<", "postgres://a:b", "token='\\\\'", "_auth=1\n", "secret=[("),
    *("eyJaaaaaaa.", "sk-", "://a:", "-----BEGIN PRIVATE KEY-----", "A: x\n"),
)


@pytest.mark.parametrize("piece", PIECES_IN_A_ROW)
def test_hostile_text_takes_linear_time(piece: str) -> None:
    assert_takes_linear_time("-----BEGIN PRIVATE KEY-----", piece)


def test_planted_values_of_all_forms_and_places_are_gone() -> None:
    """As the benchmark measures it, with other values."""
    found = [(one, left_of(one.secret, redact_text(one.text))) for one in planted(20_261, 10)]
    left = [f"{one.form} in {one.place}: {one.text}" for one, is_left in found if is_left]
    assert len(left) <= 0.03 * len(found), left


OWN = [
    ({"SHOP_API_KEY": "plain words only"}, "plain words only", REDACTED),
    *(({name: "any-value-1"}, "It is any-value-1.", f"It is {REDACTED}.") for name in ("A_PASS", "A_PWD", "A_KEY_1")),
    *(({name: "any-value-1"}, "It is any-value-1.", f"It is {REDACTED}.") for name in ("A_TOKENS", "a_secret_2")),
    ({"A_API_KEYS": "first-value-1,second-value-2"}, "second-value-2", REDACTED),
    *(({"MAX_TOKENS": value}, value, value) for value in ("16777216", "short")),
    *(({"A_PASSWORD": value}, value, value) for value in ("postgres", "short", "password")),
    ({"EDITOR_OF_CHOICE": "an-ordinary-value"}, "an-ordinary-value", "an-ordinary-value"),
]


@pytest.mark.parametrize(("variables", "text", "clean"), OWN)
def test_values_of_own_secret_variables_go(
    variables: dict[str, str], text: str, clean: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert redact_text(text) == clean


@pytest.mark.parametrize(
    ("value", "clean"),
    [
        (
            {"args": ["--token", KEY], "api_key": "abc123xyz", "deep": {"Authorization": "Bearer abcdefgh"}, "n": 3},
            {"args": ["--token", REDACTED], "api_key": REDACTED, "deep": {"Authorization": REDACTED}, "n": 3},
        ),
        ({"password": "Hunter is two", "db_pwd": "word"}, {"password": REDACTED, "db_pwd": REDACTED}),
        *(
            (each, each)
            for each in (
                {"token": "the", "ids": [1, 2], "said": {"text": "hello"}},
                {"password": "string", "passwords": "two words", "db_password": "${DB_PASSWORD}", "path": "a_pat"},
            )
        ),
    ],
)
def test_json_is_redacted_by_name_and_by_shape(value: JsonObject, clean: JsonObject) -> None:
    assert redact_json(value) == clean


def test_a_redacted_call_is_still_json() -> None:
    arguments = json.dumps({"command": f'export A_TOKEN={KEY}\necho "ok" \\ done'})
    call = ToolCall(name="bash", arguments=arguments)
    message = redact_value(Message(role="assistant", tool_calls=(call,)))
    assert json.loads(message.tool_calls[0].arguments) == {"command": f'export A_TOKEN={REDACTED}\necho "ok" \\ done'}


def node(parent: int | None, text: str, *, sampled: bool = False) -> Node:
    message = Message(role="assistant" if sampled else "user", content=text)
    return Node(parent=parent, message=message, sampled=sampled, tokens=IDS if sampled else None)


def test_nodes_from_the_secret_on_keep_no_ids_and_others_do() -> None:
    nodes = (
        node(None, "do it"),
        node(0, "printenv", sampled=True),
        node(1, f"MY_TOKEN={KEY}"),
        node(2, "done", sampled=True),
        node(1, "nothing"),  # another branch
        node(4, "done", sampled=True),
    )
    redacted, tainted = redact_nodes(nodes)
    assert tainted == {2, 3}
    assert [each.tokens for each in redacted] == [None, IDS, None, None, None, IDS]
    assert redacted[2].message.content == f"MY_TOKEN={REDACTED}"
    assert redacted[0] is nodes[0]
    for cut in range(len(nodes)):  # they may come in parts
        first, known = redact_nodes(nodes[:cut])
        second, known = redact_nodes(nodes[cut:], first=cut, tainted=known)
        assert (*first, *second) == redacted and known == tainted


def test_a_whole_episode_is_redacted_but_for_its_ids() -> None:
    clean = example_trajectory(1)
    assert redact_trajectory(clean) == clean
    task = Task(id="t", environment="e", data={"token": KEY})
    dirty = clean.model_copy(update={"id": KEY, "evidence": {"stdout": KEY}, "task": task})
    redacted = redact_trajectory(dirty)
    assert redacted.id == KEY and redacted.nodes == clean.nodes
    assert redacted.evidence == {"stdout": REDACTED} and redacted.task.data == {"token": REDACTED}
    in_tools = redact_trajectory(clean.model_copy(update={"tools": ({"description": f"use {KEY}"},)}))
    assert in_tools.tools == ({"description": f"use {REDACTED}"},) and not any(each.tokens for each in in_tools.nodes)


def test_errors_do_not_show_keys() -> None:
    text = f"Incorrect API key provided: {KEY}. Find it at ...\nsecond line"
    assert describe(ValueError(text)) == f"ValueError: Incorrect API key provided: {REDACTED}. Find it at ..."
    assert KEY[:8] not in describe(ValueError("x" * 480 + " " + KEY))
    with pytest.raises(CaughtFailure) as caught, boundary(FailureKind.MODEL, "engine"):
        raise ValueError(text)
    assert KEY not in caught.value.failure.message


def test_logs_do_not_show_keys(caplog: pytest.LogCaptureFixture) -> None:
    logger = redacting_logger("openhands_rl_plugin.tests.redaction")
    assert redacting_logger(logger.name) is logger and len(logger.filters) == 1
    with caplog.at_level(logging.INFO):
        logger.info("sent %s", {"Authorization": f"Bearer {KEY}"})
        try:
            raise ValueError(f"refused: {KEY}")
        except ValueError:
            logger.exception("failed")
    assert KEY not in caplog.text
    assert "Traceback" in caplog.text and caplog.text.count(REDACTED) >= 2
    assert isinstance(logger.filters[0], RedactingFilter)


@pytest.mark.parametrize("while_running", [False, True], ids=["at once", "as it runs"])
async def test_no_planted_secret_reaches_the_disk(tmp_path: Path, while_running: bool) -> None:
    tree = EpisodeTree()
    tree.observe(Observation(messages=(Message(role="user", content="Go."),)))
    for text, _ in IN_TEXT:
        call = ToolCall(id="1", name="bash", arguments=json.dumps({"command": f"echo {text}"}))
        metadata: JsonObject = {"headers": {"x-api-key": SHAPES["anthropic"]}, "raw": text}
        answer = Completion(message=Message(role="assistant", tool_calls=(call,)), tokens=IDS, metadata=metadata)
        tree.commit(tree.propose(answer))
        tree.observe(Observation(messages=(Message(role="tool", content=text, tool_call_id="1"),)))
    example = example_trajectory(0)
    dirty = example.model_copy(
        update={
            "nodes": tuple(Node(**vars(each)) for each in tree.nodes),
            "head": tree.head,
            "evidence": {"environment": "\n".join(f"{name.upper()}={key}" for name, key in SHAPES.items())},
            "failure": Failure(kind=FailureKind.MODEL, message=f"refused: {KEY}", boundary="engine"),
        }
    )
    async with FileTrajectoryStorage(tmp_path) as storage:
        if while_running:
            await storage.begin(EpisodeStart.of(dirty))
            for at, node in enumerate(dirty.nodes):
                await storage.grow(EpisodeGrowth(trajectory_id=dirty.id, first=at, nodes=(node,), head=at))
        await (EpisodeJournal.resumed(storage, dirty).end(dirty) if while_running else storage.add(dirty))
        score = Score(trajectory_id=dirty.id, reward=1.0, reward_version="v1", detail={"log": IN_TEXT[0][0]})
        await storage.add_scores([score])
        read = [found async for found, _ in storage.find()]
    written = read[0].model_dump_json() + "".join(
        file.read_bytes().decode("latin-1") for file in tmp_path.rglob("*") if file.is_file()
    )
    planted = [*SHAPES.values(), *(secret for _, secret in IN_TEXT)]
    assert [secret for secret in planted if secret in written] == []
    assert all(each.tokens is None for each in read[0].nodes)
