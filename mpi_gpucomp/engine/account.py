"""What a communicator tells of itself in a flight record."""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from mpi_gpucomp.monitor.trace_buffer import SEND

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpi_gpucomp.engine.agreement import CallId
    from mpi_gpucomp.engine.deadlock import DeadlockDetector
    from mpi_gpucomp.engine.scheduling import Job
    from mpi_gpucomp.monitor.recorder import TraceGroup

__all__ = ["account"]


def account(
    group: TraceGroup, watch: DeadlockDetector, jobs: Mapping[CallId, Job], broken: Exception | None
) -> dict[str, Any]:
    """Tell which calls were begun, which are under way and how, and what is waited for; ranks are of the world."""
    status = watch.status()
    links = [
        {"to": link.peer, "rail": link.rail, "chunks": link.count, "bytes": link.sent, "speed": round(link.recent)}
        for link in list(group.tally.links.values())
    ]
    return {
        "number": group.number,
        "world": list(group.world),
        "begun": status.runs,
        "waits": [{"name": call.name, "run": call.run, "title": title} for call, title in status.waits.items()],
        "calls": [_call(group, job) for job in list(jobs.values())],
        "links": links,
        "broken": None if broken is None else f"{type(broken).__name__}: {broken}",
    }


def _call(group: TraceGroup, job: Job) -> dict[str, Any]:
    now, world = perf_counter_ns(), group.world
    sends, receives = [], []
    for one in job.task.under_way():
        told = {"rank": world[one.peer], "rail": one.rail, "ms": round((now - one.posted) / 1e6, 1)}
        if one.kind == SEND:
            sends.append({**told, "bytes": one.nbytes})
        else:
            receives.append({**told, "waited_ms": round((now - one.waited) / 1e6, 1) if one.waited else None})
    return {
        **{"name": job.call.name, "run": job.call.run, "title": job.title, "said": job.said},
        "absent": sorted(world[peer] for peer in job.needs),
        "waited_for": job.waiters > 0,
        "state": "running" if job.started else "waiting for its turn" if not job.needs else "waiting for ranks to join",
        **{"sending": sends, "receiving": receives, "coding": job.task.busy},
    }
