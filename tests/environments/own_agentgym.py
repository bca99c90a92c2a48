"""AgentGym's own client with scripted actions: what it says that each step is worth.

PYTHON own_agentgym.py '{"url": URL, "client": CLASS, "index": N, "actions": [text, ...]}'     # prints a JSON list
"""

import json
import os
import sys

from agentenv import envs

OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # Its clients print.

job = json.loads(sys.argv[1])
client = getattr(envs, job["client"])(env_server_base=job["url"], data_len=1)
client.reset(job["index"])
steps = [client.step(f"Thought: it was given.\nAction: {action}") for action in job["actions"]]
client.close()
print(json.dumps([[step.reward, step.done] for step in steps]), file=OUT, flush=True)
