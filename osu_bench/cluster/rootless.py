"""Clusters without root: commands continue in a user namespace, where they may create network namespaces.

A command that removes its cluster at its end (`demo`, `headline`, experiments) replaces itself by the same command in a
new user, network and mount namespace; all of them vanish with its last process. `osu_bench cluster` needs a namespace
that outlives each call: `cluster up` starts a keeper, a process that only sleeps in one, later calls join it by its
process id, and `cluster down` ends it with the last cluster. Each user has one keeper at most.

Inside, /run is a tmpfs, which holds the state of clusters and the temporary files of MPI.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from osu_bench.cluster.plan import NAMESPACES
from osu_bench.cluster.system import PROBE, SBIN, ClusterError, check_programs, find_program, has_privileges

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["end_keeper", "enter", "join", "obstacle"]

INSIDE, KEEPER = "OSU_BENCH_USER_NAMESPACE", "OSU_BENCH_KEEPER"
"""Variables of a command that continues in a user namespace: a flag, and the keeper's process id."""
TEMPORARY = "/run/osu_bench/tmp"
UNSHARE = ("--user", "--map-root-user", "--net", "--mount")
SET_UP = f"mount -t tmpfs tmpfs /run && mkdir -p {TEMPORARY} && ip link set lo up"
KEEPER_NAME = "osu_bench-cluster-keeper"
SETTINGS = {
    "kernel/unprivileged_userns_clone": "0",
    "user/max_user_namespaces": "0",
    "kernel/apparmor_restrict_unprivileged_userns": "1",
}
"""Settings below /proc/sys that forbid user namespaces to ordinary users, and the value that does."""


def enter(*command: str) -> None:
    """Continue `osu_bench COMMAND` in a new user namespace, unless this process has the privileges already."""
    if has_privileges():
        return
    _require()
    _execute(["unshare", *UNSHARE, "--", "bash", "-c", f'{SET_UP} && exec "$@"', "bash"], command, {})


def join(*command: str, create: bool) -> bool:
    """Continue `osu_bench COMMAND` in the user namespace that outlives calls, unless privileged.

    Return False if there is none, and `create` is False.
    """
    if has_privileges():
        return True
    keeper = _keeper()
    if keeper is None and create:
        _require()
        keeper = _start_keeper()
    if keeper is None:
        return False
    entered = ["nsenter", f"--target={keeper}", "--user", "--preserve-credentials", "--net", "--mount", "--"]
    # Entering a mount namespace changes to its root directory.
    back = ["bash", "-c", 'cd "$1" && shift && exec "$@"', "bash", os.getcwd()]
    _execute([*entered, *back], command, {KEEPER: str(keeper)})
    raise AssertionError


def end_keeper() -> None:
    """End the keeper that this command has joined, if no cluster is left in its namespace."""
    keeper = os.environ.get(KEEPER)
    if keeper and not any(NAMESPACES.iterdir() if NAMESPACES.is_dir() else ()):
        with suppress(ProcessLookupError):
            os.kill(int(keeper), signal.SIGTERM)


def obstacle() -> str | None:
    """Return in one line what keeps this process from making a cluster, or None."""
    try:
        check_programs()
    except ClusterError as error:
        return str(error)
    rootless = not has_privileges()
    prefix = ["unshare", *UNSHARE] if rootless else ["unshare", "--net"]
    script = f"{SET_UP} && {PROBE}" if rootless else PROBE
    done = subprocess.run(
        [find_program("unshare") or "unshare", *prefix[1:], "--", "bash", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env=_environment({}),
        check=False,
    )
    if not done.returncode:
        return None
    reason = " ".join(done.stderr.split()) or f"unshare ended with status {done.returncode}"
    forbidding = [f"/proc/sys/{name} is {value}" for name, value in SETTINGS.items() if _setting(name) == value]
    return f"{reason} ({', '.join(forbidding)})" if rootless and forbidding else reason


def _require() -> None:
    """Raise ClusterError if a user namespace cannot hold a cluster."""
    if os.environ.get(INSIDE):
        reason: str | None = "no privileges inside a user namespace"
    else:
        reason = obstacle()
    if reason:
        raise ClusterError(
            "cluster on one machine",
            expected="root, or a user namespace with network namespaces",
            got=reason,
            remedy="Run as root, or in a container started with --privileged.",
        )


def _execute(prefix: Sequence[str], command: Sequence[str], variables: dict[str, str]) -> None:
    """Replace this process."""
    words = [find_program(prefix[0]) or prefix[0], *prefix[1:], sys.executable, "-m", "osu_bench", *command]
    sys.stdout.flush()
    os.execve(words[0], words, _environment({INSIDE: "1", "TMPDIR": TEMPORARY, **variables}))


def _environment(variables: dict[str, str]) -> dict[str, str]:
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), *SBIN))
    return {**os.environ, "PATH": path, **variables}


def _start_keeper() -> int:
    program = f"{SET_UP} && echo ready && exec -a {KEEPER_NAME} sleep infinity >/dev/null"
    words = [find_program("unshare") or "unshare", *UNSHARE, "--", "bash", "-c", program]
    keeper = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=_environment({}),
        start_new_session=True,
    )
    assert keeper.stdout is not None
    if keeper.stdout.readline() != b"ready\n":
        raise ClusterError(
            "user namespace",
            expected="a process that keeps it",
            got=f"exit status {keeper.wait()}",
            remedy="Run as root.",
        )
    return keeper.pid


def _keeper() -> int | None:
    """Return the process id of this user's keeper."""
    wanted = f"{KEEPER_NAME}\0infinity\0".encode()
    for path in Path("/proc").iterdir():
        with suppress(OSError):
            if path.name.isdigit() and path.stat().st_uid == os.geteuid() and (path / "cmdline").read_bytes() == wanted:
                return int(path.name)
    return None


def _setting(name: str) -> str | None:
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return None
