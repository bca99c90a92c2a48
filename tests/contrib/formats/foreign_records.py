"""Records as other programs write them: small, made by hand after the programs' own schemas. Each says "Fix f."."""

from __future__ import annotations

import json
from typing import Any

BASH = {"type": "function", "function": {"name": "bash", "description": "Runs.", "parameters": {"type": "object"}}}


def _call(identity: str = "c1", name: str = "bash", arguments: Any = '{"command": "ls"}') -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Rules."},
    {"role": "user", "content": "Fix f."},
    {"role": "assistant", "content": "A look.", "tool_calls": [_call()], "reasoning_content": "I should look."},
    {"role": "tool", "content": "a.py", "tool_call_id": "c1", "name": "bash"},
    {"role": "assistant", "content": "Done."},
]
_ROLES = {"assistant": "ai"}
TEXTS: list[dict[str, Any]] = [
    *CHAT[:2],
    {"role": "assistant", "content": "A look.\n\n```bash\nls\n```"},
    {"role": "user", "content": "a.py"},
    CHAT[4],
]
_INFO = {"exit_status": "Submitted", "submission": "diff --git a b", "config": {"model": {"model_name": "m"}}}
_DONE = {"type": "message", "content": [{"type": "output_text", "text": "Done."}]}
RESPONSE = {"object": "response", "output": [
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I should look."}]},
    {"type": "message", "content": [{"type": "output_text", "text": "A look."}]},
    {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": '{"command": "ls"}'},
]}  # fmt: skip
_ASKED = [{"type": "text", "text": "Fix f."}]
_LOOKING = {
    "step_id": 3, "source": "agent", "message": "A look.", "reasoning_content": "I should look.",
    "tool_calls": [{"tool_call_id": "c1", "function_name": "bash", "arguments": {"command": "ls"}}],
    "observation": {"results": [{"source_call_id": "c1", "content": "a.py"}]},
    "metrics": {"prompt_token_ids": [1, 2], "completion_token_ids": [3, 4], "logprobs": [-0.5, -0.25]},
}  # fmt: skip
_METRICS = {"prompt_token_ids": [1, 2, 3, 4, 5], "completion_token_ids": [6], "logprobs": [-0.5]}
ATIF: dict[str, Any] = {
    "schema_version": "ATIF-v1.5", "session_id": "t1",
    "agent": {"name": "terminus-2", "version": "2.0", "model_name": "m", "tool_definitions": [BASH]},
    "steps": [
        {"step_id": 1, "source": "system", "message": "Rules.", "timestamp": 10**400},
        {"step_id": 2, "source": "user", "message": _ASKED, "timestamp": "2026-11-01T10:00:00Z"},
        _LOOKING,
        {"step_id": 4, "source": "agent", "message": "Done.", "metrics": _METRICS},
    ],
}  # fmt: skip
_STEP = {"action": "ls", "observation": "a.py", "response": "A look.\n```\nls\n```", "thought": "A look."}
_THINKING = {"type": "thinking", "thinking": "I should look.", "signature": "x"}
_OBSERVATION = {"class_": "text_observation", "name": None}
_PAGE = {"class_": "web_observation", "html": None, "axtree": "tree", "url": "x", "viewport_size": None}

RECORDS: dict[str, list[Any]] = {
    "mini-swe-agent": [
        TEXTS,
        {
            "info": {**_INFO, "mini_version": "2.1.0"}, "trajectory_format": "mini-swe-agent-1.1", "instance_id": "t1",
            "messages": [*CHAT, {"role": "exit", "content": "diff", "extra": {"exit_status": "Submitted"}}],
        },
        {
            "info": _INFO, "trajectory_format": "mini-swe-agent-1.1",
            "messages": [*CHAT[:2], RESPONSE, {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
                         {"object": "response", "output": [_DONE]}],
        },
    ],
    "swe-agent": [
        {
            "trajectory": [_STEP, {"action": "submit", "observation": "", "response": "Done.", "thought": "Done."}],
            "history": [{**each, "agent": "main"} for each in TEXTS],
            "info": {"exit_status": "submitted", "submission": "diff --git a b", "model_stats": {"api_calls": 2}},
            "environment": "swe_main",
        },
        {
            "trajectory": [_STEP],
            "history": [
                *CHAT[:2],
                {"role": "assistant", "content": "A look.", "tool_calls": [_call()], "thinking_blocks": [_THINKING]},
                {"role": "tool", "content": [{"type": "text", "text": "a.py"}], "tool_call_ids": ["c1"]},
                CHAT[4],
            ],
            "info": {"exit_status": "submitted (exit_cost)", "submission": None},
        },
    ],
    "nebius": [
        {
            "instance_id": "t1", "model_name": "swe-agent-llama-70b", "target": True, "exit_status": "submitted",
            "generated_patch": "diff --git a b", "eval_logs": "1 passed",
            "trajectory": [
                {"role": "system", "text": None, "system_prompt": "Rules.", "mask": False},
                *({"role": _ROLES.get(each["role"], each["role"]), "text": each["content"], "system_prompt": None,
                   "mask": False} for each in TEXTS[1:]),
            ],
        },
        {
            "trajectory_id": "t1_7", "instance_id": "t1", "repo": "a/b", "trajectory": CHAT, "tools": [BASH],
            "model_patch": "diff --git a b", "exit_status": "submit", "resolved": 1,
        },
    ],
    "agent-data-protocol": [{"id": "t1", "details": {"resolved": True}, "content": [
        {**_OBSERVATION, "source": "user", "content": "Fix f."},
        {"class_": "code_action", "language": "bash", "content": "ls", "description": "A look."},
        {**_OBSERVATION, "source": "environment", "content": "a.py"},
        {"class_": "api_action", "function": "goto", "kwargs": {"url": "x"}, "description": None},
        _PAGE,
        {"class_": "message_action", "content": "Done.", "description": None},
    ]}],
    "sharegpt": [
        {
            "system": "Rules.", "tools": json.dumps([BASH["function"]]),
            "conversations": [
                {"from": "human", "value": "Fix f."},
                {"from": "function_call", "value": json.dumps({"name": "bash", "arguments": {"command": "ls"}})},
                {"from": "observation", "value": "a.py"},
                {"from": "gpt", "value": "Done."},
            ],
        },
    ],
    "trl": [
        {"prompt": "Fix f.", "completion": "Done."},
        {"prompt": CHAT[:2], "completion": CHAT[2:], "tools": [BASH]},
        {"prompt": CHAT[:2], "chosen": CHAT[4:], "rejected": [{"role": "assistant", "content": "No."}]},
    ],
    "atif": [ATIF],
    "sft-native": [
        {
            "messages": CHAT, "tools": [BASH], "instance_id": "t1", "resolved": True, "traj_id": "t1.x",
            "patch": "diff --git a b", "test_result": {"report": {"resolved": True}},
        },
        {
            "messages": json.dumps(TEXTS), "instance_id": "t1", "resolved": False, "model": "m", "traj_id": "t1.x",
            "patch": "",
        },
    ],
    "output-jsonl": [{"instance_id": "t1", "instruction": "Fix f.", "history": [], "test_result": {"git_patch": ""}}],
}  # fmt: skip
"""Format -> records of its kinds."""
