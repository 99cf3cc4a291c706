"""What the machine keeps of a cluster beside its namespaces: its size, files that programs need, and who uses it."""

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

__all__ = ["folder", "forget", "hold", "holders", "identity", "locked", "recall", "release", "remember"]

PLACE = Path("/run/osu_bench")
PLAN, HOLDERS = "plan.json", "holders"


def folder(name: str) -> Path:
    """Return where the files of a cluster are."""
    return PLACE / name


@contextmanager
def locked() -> Iterator[None]:
    """Let nobody else make or remove a cluster for a while."""
    PLACE.mkdir(mode=0o755, parents=True, exist_ok=True)
    with (PLACE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def remember(plan: Plan) -> str:
    """Write down what a cluster is like, for other processes, and return what tells it from later ones of its name."""
    made = uuid4().hex
    (folder(plan.name) / HOLDERS).mkdir(parents=True, exist_ok=True)
    (folder(plan.name) / PLAN).write_text(json.dumps({"identity": made, "plan": asdict(plan)}))
    return made


def recall(name: str) -> tuple[Plan, str]:
    """Return plan and identity of the cluster that is up."""
    try:
        content = json.loads((folder(name) / PLAN).read_text())
        plan = Plan(**content["plan"])
    except (OSError, ValueError, TypeError, KeyError):
        raise _none(name) from None
    if namespaces_of(name) != sorted(plan.namespaces):
        raise _none(name)
    return plan, content["identity"]


def identity(name: str) -> str | None:
    """Return the identity of the cluster that has this name now, if there is one."""
    try:
        return str(json.loads((folder(name) / PLAN).read_text())["identity"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _none(name: str) -> ClusterError:
    remedy = "Make one with `osu_bench cluster up`."
    return ClusterError(f"cluster {name}", expected="one that is up", got="none", remedy=remedy)


def forget(name: str) -> None:
    """Remove the files of a cluster."""
    shutil.rmtree(folder(name), ignore_errors=True)


def hold(name: str) -> None:
    """Note that this process uses a cluster."""
    if mine := process(os.getpid()):
        _note(name, mine).touch()


def release(name: str) -> None:
    """Note that this process no longer does."""
    if mine := process(os.getpid()):
        with suppress(OSError):
            _note(name, mine).unlink()


def _note(name: str, one: Process) -> Path:
    return folder(name) / HOLDERS / f"{one[0]}-{one[1]}"


def holders(name: str) -> list[int]:
    """Return the numbers of the processes that use a cluster and are alive."""
    notes = sorted((folder(name) / HOLDERS).glob("*-*"))
    known = [tuple(map(int, note.name.split("-"))) for note in notes]
    return [one[0] for one in known if process(one[0]) == one]
