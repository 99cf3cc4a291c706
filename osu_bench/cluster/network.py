"""Builds the namespaces, bridges and links of a cluster, and removes them.

Both ends of a link are created in the namespaces where they belong, so nothing ever appears among the machine's own
interfaces.
"""

from __future__ import annotations

from osu_bench.cluster.links import shape, shape_uplink
from osu_bench.cluster.plan import Plan, namespaces_of
from osu_bench.cluster.processes import end, within
from osu_bench.cluster.system import call

__all__ = ["build", "remove"]

# The kernel's default may be one that paces (bbr), and would be measured instead of the link.
CONGESTION_CONTROL = "cubic"


def build(plan: Plan, rate: float | None, uplink: float | None = None) -> None:
    """Make the switch, or those of all racks, the hosts, and the links between them."""
    for namespace in plan.namespaces:
        call("ip", "netns", "add", namespace)
        call("ip", "-n", namespace, "link", "set", "lo", "up")
    _make_switch(plan)
    for rack, rail in plan.uplinks():
        _join_rack(plan, rack, rail)
        shape_uplink(plan, rack, rail, uplink)
    for host in range(plan.hosts):
        _join_management(plan, host)
    for host, rail in plan.links():
        _join_rail(plan, host, rail)
        shape(plan, host, rail, rate)


def _make_switch(plan: Plan) -> None:
    racks = (plan.bridge(rail, rack) for rail in range(plan.rails) for rack in range(plan.racks))
    cores = dict.fromkeys(plan.core(rail) for _, rail in plan.uplinks())
    for bridge in (plan.management, *racks, *cores):
        call("ip", "-n", plan.switch, "link", "add", bridge, "type", "bridge")
        call("ip", "-n", plan.switch, "link", "set", bridge, "up")
    _give_address(plan.switch, plan.management, plan.management_address())


def _join_rack(plan: Plan, rack: int, rail: int) -> None:
    own, other = plan.uplink(rack, rail)
    call("ip", "-n", plan.switch, "link", "add", own, "type", "veth", "peer", "name", other)
    for port, bridge in ((own, plan.bridge(rail, rack)), (other, plan.core(rail))):
        call("ip", "-n", plan.switch, "link", "set", port, "master", bridge, "up")


def _join_management(plan: Plan, host: int) -> None:
    namespace = plan.namespace(host)
    _connect(plan, plan.management_port(host), plan.management, namespace, plan.management)
    _give_address(namespace, plan.management, plan.management_address(host))


def _join_rail(plan: Plan, host: int, rail: int) -> None:
    namespace, interface, address = plan.namespace(host), plan.interface(rail), plan.address(host, rail)
    _connect(plan, plan.port(host, rail), plan.bridge(rail, plan.rack(host)), namespace, interface)
    _give_address(namespace, interface, address)
    way = ["dev", interface, "src", address, "congctl", CONGESTION_CONTROL]
    call("ip", "-n", namespace, "route", "replace", plan.network(rail), *way)


def _connect(plan: Plan, port: str, bridge: str, namespace: str, interface: str) -> None:
    peer = ["peer", "name", interface, "netns", namespace]
    call("ip", "link", "add", port, "netns", plan.switch, "type", "veth", *peer)
    call("ip", "-n", plan.switch, "link", "set", port, "master", bridge, "up")
    call("ip", "-n", namespace, "link", "set", interface, "up")


def _give_address(namespace: str, interface: str, address: str) -> None:
    call("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", interface)


def remove(name: str) -> tuple[int, int]:
    """End what runs inside a cluster, remove its namespaces, and say how many processes and namespaces that were."""
    namespaces = namespaces_of(name)
    processes = within(namespaces)
    end(lambda: within(namespaces))
    for namespace in namespaces:
        call("ip", "netns", "del", namespace)
    return len(processes), len(namespaces)
