"""Calls of the programs that make networks, and whether this process may use them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from mpi_gpucomp.errors import GpucompError
from osu_bench.cluster.plan import path_of

__all__ = ["ClusterError", "call", "check", "inside"]


# The error of a cluster that cannot be made or used.


class ClusterError(GpucompError, RuntimeError):
    """A cluster that is not there, is in use, or that the machine does not allow."""


PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nft": "nftables",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
    "bash": "bash",
}
"""The programs, and the Debian packages that they come in."""

CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
# Administrators' programs, which PATH often lacks for others.
PLACES = ("/usr/sbin", "/sbin")


def check() -> None:
    """Refuse to start where a right or a program is missing."""
    _check_rights(Path("/proc/self/status").read_text())
    missing = [program for program in PACKAGES if _path(program) is None]
    if missing:
        packages = " ".join(dict.fromkeys(PACKAGES[program] for program in missing))
        remedy = f"Install them: apt-get install {packages}."
        raise ClusterError(
            "cluster on one machine",
            expected=f"the programs {', '.join(PACKAGES)}",
            got=f"no {' and no '.join(missing)}",
            remedy=remedy,
        )


def _check_rights(status: str) -> None:
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    held = int(match[1], 16) if match else 0
    missing = [name for name, bit in CAPABILITIES.items() if not held >> bit & 1]
    if missing:
        raise ClusterError(
            "cluster on one machine",
            expected=f"the rights {' and '.join(CAPABILITIES)}, to make network namespaces",
            got=f"user {os.geteuid()} without {' and '.join(missing)}",
            remedy="Run it as root, such as with sudo, or in a container started with --privileged.",
        )


def inside(namespace: str) -> list[str]:
    """Return the words that, put before a command, run it inside a namespace."""
    return [_path("nsenter") or "nsenter", f"--net={path_of(namespace)}", "--"]


def call(*words: str, within: str | None = None, text: str | None = None) -> str:
    """Run one of the programs, inside a namespace if one is named, and return what it says."""
    command = [_path(words[0]) or words[0], *words[1:]]
    command = inside(within) + command if within else command
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise _refused(words, within, done.stderr)
    return done.stdout


def _refused(words: Sequence[str], within: str | None, said: str) -> ClusterError:
    where = f" in {within}" if within else ""
    return ClusterError(
        f"`{' '.join(words)}`{where}",
        expected="the kernel to do it",
        got=" ".join(said.split()).rstrip(".") or "nothing said",
        remedy="The kernel needs veth, bridge, tbf and nftables; `osu_bench cluster down` removes what there is.",
    )


def _path(program: str) -> str | None:
    return shutil.which(program, path=os.pathsep.join((os.environ.get("PATH", os.defpath), *PLACES)))
