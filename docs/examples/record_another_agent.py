"""Record an agent that knows nothing of this package, tell how it fared, and train on what it did.

    python record_another_agent.py MODEL     MODEL: a directory with a small chat model

The agent here is a loop of plain HTTP requests. Any other agent is recorded alike, by its ``base_url``.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import httpx

FACTS = {"How many legs has a spider?": "8", "How many days has a week?": "7", "What is 2 + 2?": "4"}


def agent(base_url: str, question: str) -> str:
    """Somebody's agent: asks, and asks again for a shorter answer."""
    messages = [{"role": "user", "content": question}]
    for _ in range(2):
        body = {"model": "model", "messages": messages, "max_tokens": 24}
        answer = httpx.post(f"{base_url}/chat/completions", json=body, timeout=120)
        answer.raise_for_status()
        messages.append(answer.json()["choices"][0]["message"])
        messages.append({"role": "user", "content": "Shorter, please: only the number."})
    return str(messages[-2]["content"])


def server(*words: str) -> tuple[subprocess.Popen[str], str]:
    """A command of ``openhands-rl`` that prints where it listens."""
    process = subprocess.Popen(["openhands-rl", *words, "--port", "0"], stdout=subprocess.PIPE, text=True)
    for line in process.stdout or ():
        if found := re.search(r"http://127\.0\.0\.1:\d+", line.rpartition(" for ")[0] or line):
            return process, found[0]
    raise SystemExit(f"{words[0]} did not start")


def main(model: str) -> None:
    """Serve, record, judge, train."""
    serving, served = server("serve", "--model", model, "--served-model-name", "model")
    recording, gateway = server("gateway", "--upstream", f"{served}/v1", "--store", "recorded")
    try:
        for number, (question, truth) in enumerate(FACTS.items()):
            for attempt in range(4):
                session = f"{gateway}/session/{number}-{attempt}"
                answer = agent(f"{session}/v1", question)
                success = truth in answer
                httpx.post(f"{session}/end", json={"success": success}, timeout=60).raise_for_status()
                print(f"{question} {answer!r}: {success}")
        time.sleep(1)
    finally:
        for process in (recording, serving):
            process.terminate()
            process.wait(60)
    subprocess.run(["openhands-rl", "stats", "recorded"], check=True)
    train = ["openhands-rl", "train", "recorded", "--model", model, "--base-model", "model", "--adapters", "adapters"]
    subprocess.run([*train, "--algorithm", "sft", "--imitate-above", "-1" if not_one() else "0"], check=True)


def not_one() -> bool:
    """Whether nothing succeeded, so that there is nothing good to imitate (a tiny random model, say)."""
    done = subprocess.run(["openhands-rl", "list", "recorded", "--min-reward", "1", "--json"], capture_output=True)
    return not done.stdout.strip()


if __name__ == "__main__":
    main(str(Path(sys.argv[1]).resolve()))
