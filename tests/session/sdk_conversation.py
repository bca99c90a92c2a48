"""One conversation of OpenHands' V1 SDK, in whose environment this runs; prints its id and how it ended.

PYTHON sdk_conversation.py BASE_URL WORKSPACE
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

from openhands.sdk import LLM, Agent, Conversation, Tool  # pyright: ignore[reportMissingImports]
from openhands.tools.file_editor import FileEditorTool  # pyright: ignore[reportMissingImports]
from openhands.tools.terminal import TerminalTool  # pyright: ignore[reportMissingImports]

base_url, workspace = sys.argv[1:]
llm = LLM(model="openai/policy", base_url=base_url, api_key="not needed", usage_id="agent", num_retries=0)
tools = [Tool(name=TerminalTool.name, params={"terminal_type": "subprocess"}), Tool(name=FileEditorTool.name)]
conversation = Conversation(agent=Agent(llm=llm, tools=tools), workspace=workspace, visualizer=None)
conversation.send_message("Write a note.")
conversation.run()
report = {
    "id": str(conversation.id),
    "status": conversation.state.execution_status.value,
    "sdk": version("openhands-sdk"),
}
print(json.dumps(report))
conversation.close()
