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
TEXTS: list[dict[str, Any]] = [
    {"role": "system", "content": "Rules."},
    {"role": "user", "content": "Fix f."},
    {"role": "assistant", "content": "A look.\n\n```bash\nls\n```"},
    {"role": "user", "content": "a.py"},
    {"role": "assistant", "content": "Done."},
]
_INFO = {"exit_status": "Submitted", "submission": "diff --git a b", "config": {"model": {"model_name": "m"}}}
RESPONSE = {
    "object": "response",
    "output": [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I should look."}]},
        {"type": "message", "content": [{"type": "output_text", "text": "A look."}]},
        {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": '{"command": "ls"}'},
    ],
}
ATIF: dict[str, Any] = {
    "schema_version": "ATIF-v1.5",
    "session_id": "t1",
    "agent": {"name": "terminus-2", "version": "2.0", "model_name": "m", "tool_definitions": [BASH]},
    "steps": [
        {"step_id": 1, "source": "system", "message": "Rules."},
        {
            "step_id": 2,
            "source": "user",
            "message": [{"type": "text", "text": "Fix f."}],
            "timestamp": "2026-11-01T10:00:00Z",
        },
        {
            "step_id": 3,
            "source": "agent",
            "message": "A look.",
            "reasoning_content": "I should look.",
            "tool_calls": [{"tool_call_id": "c1", "function_name": "bash", "arguments": {"command": "ls"}}],
            "observation": {"results": [{"source_call_id": "c1", "content": "a.py"}]},
            "metrics": {"prompt_token_ids": [1, 2], "completion_token_ids": [3, 4], "logprobs": [-0.5, -0.25]},
        },
        {
            "step_id": 4,
            "source": "agent",
            "message": "Done.",
            "metrics": {"prompt_token_ids": [1, 2, 3, 4, 5], "completion_token_ids": [6], "logprobs": [-0.5]},
        },
    ],
}

RECORDS: dict[str, list[Any]] = {
    "mini-swe-agent": [
        TEXTS,
        {"info": _INFO, "messages": TEXTS, "trajectory_format": "mini-swe-agent-1"},
        {
            "info": {**_INFO, "mini_version": "2.1.0"},
            "messages": [*CHAT, {"role": "exit", "content": "diff", "extra": {"exit_status": "Submitted"}}],
            "trajectory_format": "mini-swe-agent-1.1",
            "instance_id": "t1",
        },
        {
            "info": _INFO,
            "messages": [
                *CHAT[:2],
                RESPONSE,
                {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
                {
                    "object": "response",
                    "output": [{"type": "message", "content": [{"type": "output_text", "text": "Done."}]}],
                },
            ],
            "trajectory_format": "mini-swe-agent-1.1",
        },
    ],
    "swe-agent": [
        {
            "trajectory": [
                {"action": "ls", "observation": "a.py", "response": "A look.\n```\nls\n```", "thought": "A look."},
                {"action": "submit", "observation": "", "response": "Done.", "thought": "Done."},
            ],
            "history": [{**each, "agent": "main"} for each in TEXTS],
            "info": {"exit_status": "submitted", "submission": "diff --git a b", "model_stats": {"api_calls": 2}},
            "environment": "swe_main",
        },
        {
            "trajectory": [{"action": "ls", "observation": "a.py", "response": "A look.", "thought": "A look."}],
            "history": [
                *CHAT[:2],
                {
                    "role": "assistant",
                    "content": "A look.",
                    "tool_calls": [_call()],
                    "thinking_blocks": [{"type": "thinking", "thinking": "I should look.", "signature": "x"}],
                },
                {
                    "role": "tool",
                    "content": [{"type": "text", "text": "a.py"}],
                    "tool_call_ids": ["c1"],
                    "tool_call_id": "c1",
                },
                {"role": "assistant", "content": "Done."},
            ],
            "info": {"exit_status": "submitted (exit_cost)", "submission": None},
        },
    ],
    "nebius": [
        {
            "instance_id": "t1",
            "model_name": "swe-agent-llama-70b",
            "target": True,
            "trajectory": [
                {"role": "system", "text": None, "system_prompt": "Rules.", "mask": False},
                {"role": "user", "text": "Fix f.", "system_prompt": None, "mask": False},
                {"role": "ai", "text": "A look.\n\n```bash\nls\n```", "system_prompt": None, "mask": False},
                {"role": "user", "text": "a.py", "system_prompt": None, "mask": False},
                {"role": "ai", "text": "Done.", "system_prompt": None, "mask": False},
            ],
            "exit_status": "submitted",
            "generated_patch": "diff --git a b",
            "eval_logs": "1 passed",
        },
        {
            "trajectory_id": "t1_7",
            "instance_id": "t1",
            "repo": "a/b",
            "trajectory": CHAT,
            "tools": [BASH],
            "model_patch": "diff --git a b",
            "exit_status": "submit",
            "resolved": 1,
        },
    ],
    "agent-data-protocol": [
        {
            "id": "t1",
            "content": [
                {"class_": "text_observation", "source": "user", "content": "Fix f.", "name": None},
                {"class_": "code_action", "language": "bash", "content": "ls", "description": "A look."},
                {"class_": "text_observation", "source": "environment", "content": "a.py"},
                {"class_": "api_action", "function": "goto", "kwargs": {"url": "x"}, "description": None},
                {
                    "class_": "web_observation",
                    "html": None,
                    "axtree": "tree",
                    "url": "x",
                    "viewport_size": None,
                    "image_observation": None,
                },
                {"class_": "message_action", "content": "Done.", "description": None},
            ],
            "details": {"resolved": True},
        }
    ],
    "sharegpt": [
        {
            "conversations": [
                {"from": "human", "value": "Fix f."},
                {"from": "function_call", "value": json.dumps({"name": "bash", "arguments": {"command": "ls"}})},
                {"from": "observation", "value": "a.py"},
                {"from": "gpt", "value": "Done."},
            ],
            "system": "Rules.",
            "tools": json.dumps([BASH["function"]]),
        },
        {
            "id": "t1",
            "conversations": [
                {"from": "system", "value": "Rules."},
                {"from": "human", "value": "Fix f."},
                {"from": "gpt", "value": "Done."},
            ],
        },
    ],
    "trl": [
        {"prompt": "Fix f.", "completion": "Done."},
        {"prompt": CHAT[:2], "completion": CHAT[2:], "tools": [BASH]},
        {"prompt": CHAT[:2], "chosen": CHAT[4:], "rejected": [{"role": "assistant", "content": "No."}]},
        {"chosen": [*TEXTS[:2], TEXTS[4]], "rejected": [*TEXTS[:2], {"role": "assistant", "content": "No."}]},
    ],
    "atif": [ATIF],
    "sft-native": [
        {
            "messages": CHAT,
            "tools": [BASH],
            "instance_id": "t1",
            "resolved": True,
            "traj_id": "t1.x",
            "patch": "diff --git a b",
            "test_result": {"report": {"resolved": True}},
        },
        {
            "messages": json.dumps(TEXTS),
            "instance_id": "t1",
            "resolved": False,
            "model": "m",
            "traj_id": "t1.x",
            "patch": "",
        },
    ],
    "predictions": [{"instance_id": "t1", "model_patch": "diff", "model_name_or_path": "m"}],
    "output-jsonl": [{"instance_id": "t1", "instruction": "Fix f.", "history": [], "test_result": {"git_patch": ""}}],
}
"""Format -> records of its kinds."""
