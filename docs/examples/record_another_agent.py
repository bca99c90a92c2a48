"""Record an agent that knows nothing of this package, tell how it fared, and train on what it did.

    python record_another_agent.py MODEL     MODEL: a directory with a small chat model

The agent here is a loop of plain HTTP requests. Any other agent is recorded alike, by its ``base_url``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx

CAPITALS = {"France": "Paris", "Peru": "Lima", "Kenya": "Nairobi"}


def agent(base_url: str, country: str) -> str:
    """Somebody's agent: asks, has the answer checked, and gives the first one."""
    messages = [{"role": "user", "content": f"What is the capital of {country}?"}]
    for question in ("Are you sure?", ""):
        body = {"model": "model", "messages": messages, "max_tokens": 16}
        answer = httpx.post(f"{base_url}/chat/completions", json=body, timeout=120)
        answer.raise_for_status()
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": question}]
    return str(messages[1]["content"])


def server(*words: str) -> tuple[subprocess.Popen[str], str]:
    """A command of ``openhands-rl`` that prints where it listens."""
    process = subprocess.Popen(["openhands-rl", *words, "--port", "0"], stdout=subprocess.PIPE, text=True)
    for line in process.stdout or ():
        if found := re.search(r"(?:at|base_url:) (http://127\.0\.0\.1:\d+)/v1", line):
            return process, found[1]
    raise SystemExit(f"{words[0]} did not start")


def main(model: str) -> None:
    """Serve, record, judge, train."""
    serving, served = server("serve", "--model", model, "--served-model-name", "model")
    recording, gateway = server("gateway", "--upstream", f"{served}/v1", "--store", "recorded")
    try:
        for country, city in CAPITALS.items():
            for attempt in range(4):
                session = f"{gateway}/session/{country}-{attempt}"
                answer = agent(f"{session}/v1", country)
                httpx.post(f"{session}/end", json={"success": city in answer}, timeout=60).raise_for_status()
                print(f"{country}: {answer!r}, {'right' if city in answer else 'wrong'}")
    finally:
        for process in (recording, serving):
            process.terminate()
            process.wait(60)
    subprocess.run(["openhands-rl", "list", "recorded", "--by"], check=True)
    train = ["openhands-rl", "train", "recorded", "--model", model, "--base-model", "model", "--adapters", "adapters"]
    subprocess.run([*train, "--algorithm", "sft"], check=True)


if __name__ == "__main__":
    main(str(Path(sys.argv[1]).resolve()))
