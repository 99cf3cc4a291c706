"""What the tests of the cluster share: whether it can be made here, names, programs, and patience."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from time import monotonic, sleep

import pytest

from osu_bench.cluster import Cluster, ClusterError
from osu_bench.cluster.system import call, check

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RANKS = [sys.executable, str(HERE / "cluster_ranks.py")]
WIRE = [sys.executable, str(HERE / "cluster_wire.py")]
STREAM = [sys.executable, str(HERE / "cluster_stream.py")]
COMMAND = [sys.executable, "-m", "osu_bench", "cluster"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}

# In a namespace of its own, which ends with it.
PROBE = """
ip link add name left0 type veth peer name right0 && ip link add name bridge0 type bridge &&
tc qdisc add dev left0 root tbf rate 1gbit burst 256k limit 1m && nft add table netdev left0
"""

_numbers = count()


def skip_unless_possible() -> None:
    """Skip where the rights, a program or the kernel do not allow a cluster."""
    try:
        check()
    except ClusterError as error:
        pytest.skip(str(error))
    probed = subprocess.run(["unshare", "--net", "bash", "-c", PROBE], capture_output=True, text=True, timeout=60)
    if probed.returncode:
        pytest.skip(f"no network namespaces as the cluster needs them: {probed.stderr.strip()}")


def new_name() -> str:
    """Return a name that no other test, of this process or of another, gives to a cluster."""
    return f"t{os.getpid()}x{next(_numbers)}"


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until something is so."""
    limit = monotonic() + seconds
    while not condition():
        assert monotonic() < limit, "it did not come about"
        sleep(0.05)


def sent_bytes(cluster: Cluster, host: int, interface: str) -> int:
    """Return what a host has sent on an interface."""
    shown = call("ip", "-j", "-s", "-n", cluster.plan.namespace(host), "link", "show", "dev", interface)
    count: int = json.loads(shown)[0]["stats64"]["tx"]["bytes"]
    return count


def own_network() -> list[str]:
    """Describe the network of the machine itself."""
    commands = ("ip -br link", "ip -br addr", "ip route show table all", "nft list ruleset")
    return [call(*command.split()) for command in commands]
