"""The files of a cluster: its plan, its identity, launcher files, and the processes that use it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from uuid import uuid4

from osu_bench.cluster.plan import Plan, namespaces_of
from osu_bench.cluster.processes import Process, process
from osu_bench.cluster.system import ClusterError

__all__ = ["folder", "forget", "hold", "holders", "identity", "locked", "not_up", "recall", "release", "remember"]

PLACE = Path("/run/osu_bench")
PLAN, HOLDERS = "plan.json", "holders"


def folder(name: str) -> Path:
    """Return the directory of a cluster's files."""
    return PLACE / name


@contextmanager
def locked() -> Iterator[None]:
    """Hold the lock under which clusters are made and removed."""
    PLACE.mkdir(mode=0o755, parents=True, exist_ok=True)
    with (PLACE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def remember(plan: Plan) -> str:
    """Write a cluster's plan for other processes; return an identity that later clusters of this name do not have."""
    made = uuid4().hex
    (folder(plan.name) / HOLDERS).mkdir(parents=True, exist_ok=True)
    (folder(plan.name) / PLAN).write_text(json.dumps({"identity": made, "plan": asdict(plan)}))
    return made


def recall(name: str) -> tuple[Plan, str]:
    """Return the plan and identity of a cluster that is up."""
    try:
        content = json.loads((folder(name) / PLAN).read_text())
        plan = Plan(**content["plan"])
    except (OSError, ValueError, TypeError, KeyError):
        raise not_up(name) from None
    if namespaces_of(name) != sorted(plan.namespaces):
        raise not_up(name)
    return plan, content["identity"]


def identity(name: str) -> str | None:
    """Return the identity of the current cluster of this name, or None."""
    try:
        return str(json.loads((folder(name) / PLAN).read_text())["identity"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def not_up(name: str) -> ClusterError:
    """Return the error of a cluster that is not up."""
    remedy = "Make one with `osu_bench cluster up`."
    return ClusterError(f"cluster {name}", expected="a cluster that is up", got="none", remedy=remedy)


def forget(name: str) -> None:
    """Remove the files of a cluster."""
    shutil.rmtree(folder(name), ignore_errors=True)


def hold(name: str) -> None:
    """Register this process as a user of a cluster."""
    if mine := process(os.getpid()):
        _entry(name, mine).touch()


def release(name: str) -> None:
    """Unregister this process."""
    if mine := process(os.getpid()):
        with suppress(OSError):
            _entry(name, mine).unlink()


def _entry(name: str, one: Process) -> Path:
    return folder(name) / HOLDERS / f"{one[0]}-{one[1]}"


def holders(name: str) -> list[int]:
    """Return the ids of live processes that use a cluster."""
    entries = sorted((folder(name) / HOLDERS).glob("*-*"))
    known = [tuple(map(int, entry.name.split("-"))) for entry in entries]
    return [one[0] for one in known if process(one[0]) == one]
