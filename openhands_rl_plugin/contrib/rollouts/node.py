"""What Polar's clients ask of its gateways: hold all calls of the model while its weights are replaced."""

from __future__ import annotations

import asyncio
import math
from datetime import UTC, datetime

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from openhands_rl_plugin.contrib.rollouts.settings import ServiceOptions
from openhands_rl_plugin.models.balancing.balancer import Balancer

_USUAL_SECONDS, _MOST_SECONDS = 300.0, 3600.0


class ServiceNode:
    """The one node, which is the service itself. ``balancer``: what calls go through; without one none is held."""

    def __init__(self, service: ServiceOptions, balancer: Balancer | None) -> None:
        self._service = service
        self._balancer = balancer

    @property
    def routes(self) -> list[Route]:
        """Its routes."""
        return [
            Route("/nodes", self.nodes),
            Route("/admin/inference/pause", self.pause, methods=["POST"]),
            Route("/admin/inference/resume", self.resume, methods=["POST"]),
        ]

    async def nodes(self, request: Request) -> Response:
        """``GET /nodes``: this address, as the client knows it."""
        service = self._service
        node = {
            "node_id": "openhands-rl",
            "gateway_url": str(request.base_url).rstrip("/"),
            "max_init_workers": service.workers * max(1, service.prepared),
            "max_run_workers": service.workers * service.playing,
            "max_postrun_workers": service.workers * service.grading,
            "healthy": True,
            "draining": False,
            "heartbeat_interval_seconds": 30,
            "last_heartbeat": datetime.now(UTC).isoformat(),
        }
        return JSONResponse([node])

    async def pause(self, request: Request) -> Response:
        """``POST /admin/inference/pause?timeout_seconds=``: when it answers, no call of the model is open, and none
        begins until ``resume``, or for ``--longest-pause``, which each pause begins anew.
        """
        try:
            seconds = float(request.query_params.get("timeout_seconds", _USUAL_SECONDS))
        except ValueError as error:
            raise HTTPException(400, "timeout_seconds has to be a number") from error
        if not math.isfinite(seconds) or not 0 < seconds <= _MOST_SECONDS:
            raise HTTPException(400, f"timeout_seconds has to be at most {_MOST_SECONDS:.0f}")
        left = await asyncio.to_thread(self._known().hold, seconds, self._service.longest_pause)
        if left:
            raise HTTPException(504, f"{left} calls of the model were still open after {seconds:g} s; they go on")
        return JSONResponse({"paused": True, "inflight": 0})

    async def resume(self, _: Request) -> Response:
        """``POST /admin/inference/resume``."""
        self._known().release()
        return JSONResponse({"paused": False, "inflight": 0})

    def _known(self) -> Balancer:
        if self._balancer is None:
            raise HTTPException(409, "calls of --base-url cannot be held; start with --base-urls (one is enough)")
        return self._balancer
