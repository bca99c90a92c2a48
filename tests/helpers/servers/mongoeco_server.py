# /// script
# requires-python = ">=3.13"
# dependencies = ["mongoeco==4.11.0", "pymongo==4.20.0"]
# ///
"""A server of MongoDB's wire protocol that keeps its data in memory, or in an SQLite file:
``mongoeco_server.py PORT [FILE]``.

With ``--python`` it prints the interpreter that runs it and ends. It says "ready" when it listens, and ends when its
standard input does, so that it does not outlive a test session that was killed.
"""

import asyncio
import os
import sys
import threading

from mongoeco.engines.memory import MemoryEngine
from mongoeco.engines.sqlite import SQLiteEngine
from mongoeco.wire.proxy import AsyncMongoEcoProxyServer


async def serve(port: int, *file: str) -> None:
    async with AsyncMongoEcoProxyServer(engine=SQLiteEngine(*file) if file else MemoryEngine(), port=port):
        print("ready", flush=True)
        await asyncio.Event().wait()


def end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "--python":
        print(sys.executable)
    else:
        threading.Thread(target=end_with_parent, daemon=True).start()
        asyncio.run(serve(int(sys.argv[1]), *sys.argv[2:]))
