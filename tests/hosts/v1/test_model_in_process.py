"""A Hugging Face model in this process is the policy of a conversation: no model server is asked."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from needs import needs_bubblewrap

pytest.importorskip("torch")
pytest.importorskip("transformers")

from broken_repository import REPAIR, passes, repository
from fixing_model import write_fixer
from openhands.sdk import LLM
from sdk_play import converse, make_agent, stored

from openhands_rl_plugin.core.types import StopReason


@pytest.mark.slow
@needs_bubblewrap
def test_a_repository_is_mended_by_a_model_in_this_process(tmp_path: Path) -> None:
    repository(tmp_path / "project")
    mend = f"{REPAIR} && python3 -m unittest -q"
    model = write_fixer(tmp_path / "model", ("terminal", {"command": mend}), ("finish", {"message": "It passes."}))
    # Nobody listens there.
    llm = LLM(model="openai/fixer", base_url="http://127.0.0.1:9/v1", api_key="none", num_retries=0, usage_id="agent")
    rl: dict[str, object] = {"engine": "transformers", "serving": {"model": str(model)}}
    rl |= {"workspace": {"isolation": "bubblewrap"}, "max_response_length": 64}
    agent = make_agent(llm, tmp_path / "store", rl=rl)
    conversation = converse(agent, tmp_path / "project")
    conversation.send_message("Make the failing test pass.")
    conversation.run()
    counted = conversation.conversation_stats.get_combined_metrics().accumulated_token_usage
    conversation.close()
    [episode] = asyncio.run(stored(tmp_path / "store"))
    assert (episode.stop, episode.failure) == (StopReason.TERMINATED, None) and passes(tmp_path / "project")
    sampled = list(episode.sampled())
    assert [[call.name for call in node.message.tool_calls] for node in sampled] == [["terminal"], ["finish"]]
    assert [node.tokens.extends for node in sampled if node.tokens] == [False, True]
    for node in sampled:
        assert node.tokens is not None and len(node.tokens.sampled_ids) == len(node.tokens.logprobs) == 2
        assert all(-0.01 < logprob <= 0.0 for logprob in node.tokens.logprobs)
    assert counted is not None and counted.prompt_tokens == episode.usage.prompt_tokens > 0
