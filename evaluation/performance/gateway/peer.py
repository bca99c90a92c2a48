"""Starts another project's gateway, with that project's own Python; nothing of this one is imported.

    PYTHON evaluation/performance/gateway/peer.py {agentlightning,rllm,rllm-sqlite,openenv} UPSTREAM PORT FOLDER

UPSTREAM is the model server's base URL; FOLDER takes what the gateway stores.
"""

from __future__ import annotations

import sys
import threading

MODEL = "policy"


def agentlightning(upstream: str, port: int, folder: str) -> None:
    """Its models and rollouts are registered over HTTP afterwards."""
    import uvicorn
    from agentlightning.server.app import create_app

    proxy = {
        "model_name": MODEL,
        "include_log_probs": True,
        "include_routed_experts": False,
        "train": {"temperature": 1},
        "val": {"temperature": 1},
    }
    app = create_app({"host": "127.0.0.1", "port": port, "key": "", "default_proxy": proxy})
    uvicorn.run(app, host="127.0.0.1", port=port, timeout_keep_alive=120, log_level="warning", access_log=False)


def rllm(upstream: str, port: int, folder: str, store: str = "memory") -> None:
    """With the store in memory, its fastest."""
    import uvicorn
    from rllm_model_gateway.models import GatewayConfig, WorkerConfig
    from rllm_model_gateway.server import create_app

    config = GatewayConfig(
        port=port,
        workers=[WorkerConfig(url=upstream, model_name=MODEL)],
        store_worker=store,
        db_path=f"{folder}/traces.db",
        # What an answered call left must be stored, as it is here.
        sync_traces=store == "sqlite",
        health_check_interval=3600.0,
    )
    uvicorn.run(create_app(config), host="127.0.0.1", port=port, log_level="warning", access_log=False)


def openenv(upstream: str, port: int, folder: str) -> None:
    """Its sessions are registered over HTTP afterwards."""
    from openenv.core.harness.capture.runner import CaptureServer

    CaptureServer(llm_url=upstream, model=MODEL, port=port).start()
    threading.Event().wait()


def main() -> None:
    """Serve until killed."""
    name, upstream, port, folder = sys.argv[1:]
    if name == "rllm-sqlite":
        rllm(upstream, int(port), folder, store="sqlite")
    else:
        {"agentlightning": agentlightning, "rllm": rllm, "openenv": openenv}[name](upstream, int(port), folder)


if __name__ == "__main__":
    main()
