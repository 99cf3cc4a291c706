"""The programs that configure networks, and the privileges that they need."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from mpi_gpucomp.errors import GpucompError
from osu_bench.cluster.plan import path_of

__all__ = ["PROBE", "ClusterError", "call", "check", "find_program", "has_privileges", "inside"]

TOPIC = "cluster on one machine"
PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
    "bash": "bash",
}
"""Required programs and their Debian packages."""
OPTIONAL_PACKAGES = {"nft": "nftables"}
"""Programs that only cuts with packet loss need."""
CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
SBIN = ("/usr/sbin", "/sbin")
"""Administration programs; the PATH of ordinary users often lacks these directories."""

PROBE = (
    "ip link add name left0 type veth peer name right0 && ip link add name bridge0 type bridge && "
    "tc qdisc add dev left0 root tbf rate 1gbit burst 256k limit 1m"
)
"""Shell commands that fail in a new network namespace if the kernel lacks what a cluster needs."""


class ClusterError(GpucompError, RuntimeError):
    """A cluster is missing, in use, or not possible on this machine."""


def check() -> None:
    """Raise ClusterError if this process lacks a privilege or a program."""
    if missing := _missing_capabilities():
        raise ClusterError(
            TOPIC,
            expected=f"the capabilities {' and '.join(CAPABILITIES)}, to create network namespaces",
            got=f"user {os.geteuid()} without {' and '.join(missing)}",
            remedy="Use the command `osu_bench`, which enters a user namespace where it can, or run as root.",
        )
    check_programs()


def check_programs() -> None:
    """Raise ClusterError if a required program is missing."""
    missing = [program for program in PACKAGES if find_program(program) is None]
    if missing:
        packages = " ".join(dict.fromkeys(PACKAGES[program] for program in missing))
        raise ClusterError(
            TOPIC,
            expected=f"the programs {', '.join(PACKAGES)}",
            got=f"no {' and no '.join(missing)}",
            remedy=f"Install them: apt-get install {packages}.",
        )


def has_privileges() -> bool:
    """Return True if this process may create network namespaces."""
    return not _missing_capabilities()


def _missing_capabilities() -> list[str]:
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    held = int(match[1], 16) if match else 0
    return [name for name, bit in CAPABILITIES.items() if not held >> bit & 1]


def inside(namespace: str) -> list[str]:
    """Return the command prefix that runs a program inside a network namespace."""
    return [find_program("nsenter") or "nsenter", f"--net={path_of(namespace)}", "--"]


def call(*words: str, within: str | None = None, text: str | None = None) -> str:
    """Run a program, inside a namespace if one is given, and return its output."""
    program = find_program(words[0])
    if program is None:
        package = {**PACKAGES, **OPTIONAL_PACKAGES}[words[0]]
        raise ClusterError(
            TOPIC,
            expected=f"the program {words[0]}",
            got="none",
            remedy=f"Install it: apt-get install {package}.",
        )
    command = [*(inside(within) if within else []), program, *words[1:]]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise _failed(words, within, done.stderr)
    return done.stdout


def _failed(words: Sequence[str], within: str | None, stderr: str) -> ClusterError:
    where = f" in {within}" if within else ""
    return ClusterError(
        f"`{' '.join(words)}`{where}",
        expected="success",
        got=" ".join(stderr.split()).rstrip(".") or "no error text",
        remedy="The kernel needs veth, bridge, tbf and nftables; `osu_bench cluster down` removes partial clusters.",
    )


def find_program(program: str) -> str | None:
    """Return the path of a program, on PATH or among the administration programs."""
    return shutil.which(program, path=os.pathsep.join((os.environ.get("PATH", os.defpath), *SBIN)))
