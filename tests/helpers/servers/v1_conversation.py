"""A condensed conversation of OpenHands V1 with RLAgent, in whose environment this runs.

PYTHON v1_conversation.py BASE_URL MODEL STORE WORKSPACE
"""

from __future__ import annotations

import sys

from openhands.sdk import LLM, Conversation  # pyright: ignore[reportMissingImports]
from openhands.sdk.context.condenser import LLMSummarizingCondenser  # pyright: ignore[reportMissingImports]

from openhands_rl_plugin.hosts.v1 import RLAgent  # pyright: ignore[reportMissingImports]

url, model, store, workspace = sys.argv[1:]


def make_llm(usage: str) -> LLM:
    return LLM(model=f"openai/{model}", base_url=url, api_key="key", usage_id=usage, num_retries=0)


agent = RLAgent(
    llm=make_llm("agent"),
    tools=[],
    rl={"max_turns": 50, "storage": {"path": store, "durable": False}},
    condenser=LLMSummarizingCondenser(llm=make_llm("condenser"), max_size=10),
)
conversation = Conversation(agent=agent, workspace=workspace, visualizer=None, stuck_detection=False)
conversation.send_message("Think.")
conversation.run()
conversation.close()
