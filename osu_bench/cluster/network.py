"""The network of a cluster: namespaces, bridges and links, which are built, shaped, cut, read and removed.

Both ends of a link are created inside namespaces, so no interface ever appears in the machine's own network.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from mpi_gpucomp.errors import SpecError
from osu_bench.cluster.plan import Plan, namespaces_of
from osu_bench.cluster.processes import end, within
from osu_bench.cluster.system import call, find_program

__all__ = [
    "DOWN",
    "SILENT",
    "UP",
    "Link",
    "Rate",
    "build",
    "cut",
    "heal",
    "parse_rate",
    "rate_label",
    "read",
    "read_uplinks",
    "remove",
    "shape",
    "shape_uplink",
    "shaping",
]

Rate = str | float | None
"""Bits per second, or text such as 1gbit; None, 0 and `unlimited` mean an unshaped link."""

UNITS = {"": 1.0, "bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
LEAST, MOST = 1e5, 1e12

# The token bucket must exceed one 64 KiB GSO packet plus the tokens of one scheduling interval: with 64 KiB a stream
# lost packets, and a third of its rate at 5 Gbit/s. But a full bucket passes the first message after a pause at full
# speed: with 256 KiB, a 256 KiB message took 7 to 44 % of its nominal time and a 1 MiB message 80 to 85 %; with 96 KiB
# they took 72 to 91 % and 96 to 101 %. With 96 KiB, streams reach 93 to 96 % of the rate (headers are 4 %) at 0.5, 1
# and 5 Gbit/s. htb measured the same as tbf. Steps of 4 ms in short messages are the scheduler's tick, not shaping:
# they appear with either discipline while processes spin on all cores.
LEAST_BURST = 96 << 10
BURST_SECONDS = 150e-6

# The queue holds the largest window of one TCP connection (6 MB by default), so that a single stream drops nothing.
QUEUE_BYTES = 8 << 20


def parse_rate(rate: Rate) -> float | None:
    """Return a rate in bits per second, or None for an unshaped link."""
    if rate is None or str(rate).strip().lower() in ("0", "0.0", "unlimited"):
        return None
    match = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)(?:/s)?", str(rate).strip().lower())
    try:
        bits = float(match[1]) * UNITS[match[2]] if match else 0.0
    except (KeyError, ValueError):
        bits = 0.0
    if not LEAST <= bits <= MOST:
        remedy = "Write 1gbit, 500mbit or unlimited."
        expected = "a number with kbit, mbit or gbit, from 100kbit to 1tbit"
        raise SpecError("rate of a link", expected=expected, got=f"'{rate}'", remedy=remedy)
    return bits


def rate_label(rate: float | None) -> str:
    """Format a rate in the largest unit that gives at least 1."""
    if rate is None:
        return "unlimited"
    unit = next(name for name, size in reversed(UNITS.items()) if rate >= size)
    return f"{rate / UNITS[unit]:g}{unit}"


def shaping(rate: float) -> list[str]:
    """Return the arguments of `tc qdisc` that shape an interface to a rate."""
    burst = max(LEAST_BURST, round(rate / 8 * BURST_SECONDS))
    return ["tbf", "rate", f"{rate:.0f}bit", "burst", str(burst), "limit", str(QUEUE_BYTES)]


UP, DOWN, SILENT = "up", "down", "silent"
PARTS = 10_000
"""Packet loss is configured in parts per PARTS."""


@dataclass(frozen=True)
class Link:
    """The state of a host's link on one rail."""

    host: int
    rail: int
    address: str
    rate: float | None
    """Bits per second in each direction; None if unshaped."""
    state: str = UP
    """UP; DOWN (no carrier); SILENT (all packets dropped); or `loss 25 %`."""


def shape(plan: Plan, host: int, rail: int, rate: float | None) -> None:
    """Shape both ends of a link to a rate; None removes the shaping."""
    for namespace, interface in _ends(plan, host, rail):
        _shape_interface(namespace, interface, rate)


def shape_uplink(plan: Plan, rack: int, rail: int, rate: float | None) -> None:
    """Shape both ends of a rack's uplink to a rate; None removes the shaping."""
    for interface in plan.uplink(rack, rail):
        _shape_interface(plan.switch, interface, rate)


def _shape_interface(namespace: str, interface: str, rate: float | None) -> None:
    if rate is not None:
        call("tc", "qdisc", "replace", "dev", interface, "root", *shaping(rate), within=namespace)
    elif _shaped(call("tc", "-j", "qdisc", "show", "dev", interface, within=namespace)):
        call("tc", "qdisc", "del", "dev", interface, "root", within=namespace)


def _ends(plan: Plan, host: int, rail: int) -> tuple[tuple[str, str], tuple[str, str]]:
    return (plan.switch, plan.port(host, rail)), (plan.namespace(host), plan.interface(rail))


def _shaped(listing: str) -> dict[str, float]:
    """Return the rates of shaped interfaces, from the JSON of `tc qdisc show`."""
    disciplines: list[dict[str, Any]] = json.loads(listing)
    return {one.get("dev", ""): one["options"]["rate"] * 8.0 for one in disciplines if one["kind"] == "tbf"}


def cut(plan: Plan, host: int, rail: int, how: str | float = DOWN) -> None:
    """Take a link down (no carrier), or drop all packets (SILENT) or a percentage of them.

    Each drop is one GSO packet of up to 64 KiB.
    """
    loss = _loss(how)
    heal(plan, host, rail)
    if loss is None:
        # The switch's end: the host's end loses its carrier and keeps its address and routes.
        call("ip", "-n", plan.switch, "link", "set", plan.port(host, rail), "down")
        return
    for namespace, interface in _ends(plan, host, rail):
        call("nft", "-f", "-", within=namespace, text=_rules(interface, loss))


def _loss(how: str | float) -> int | None:
    """Return the packets to drop out of PARTS, or None for a link without carrier."""
    if isinstance(how, str):
        known = {DOWN: None, SILENT: PARTS}
        if how in known:
            return known[how]
    elif 100 / PARTS <= how <= 100:
        return round(how * PARTS / 100)
    expected = f"{DOWN}, {SILENT}, or a percentage of packets to drop, from 0.01 to 100"
    raise SpecError("cut of a link", expected=expected, got=f"{how!r}", remedy="Choose one of these.")


def _rules(interface: str, loss: int) -> str:
    share = f"numgen random mod {PARTS} < {loss} " if loss < PARTS else ""
    hook = f'type filter hook ingress device "{interface}" priority 0; policy accept;'
    return f"table netdev {interface} {{ chain arriving {{ {hook} {share}drop; }}; }}\n"


def heal(plan: Plan, host: int, rail: int) -> None:
    """Undo cuts of every kind."""
    for namespace, interface in _ends(plan, host, rail) if find_program("nft") else ():
        # Deleting fails if the table does not exist; adding an existing table does nothing.
        table = f"table netdev {interface}"
        call("nft", "-f", "-", within=namespace, text=f"add {table}\ndelete {table}\n")
    call("ip", "-n", plan.switch, "link", "set", plan.port(host, rail), "up")


def read(plan: Plan) -> list[Link]:
    """Read the state of all links from the kernel."""
    rates = _shaped(call("tc", "-j", "qdisc", "show", within=plan.switch))
    interfaces = json.loads(call("ip", "-j", "-n", plan.switch, "link", "show"))
    up = {one["ifname"] for one in interfaces if "UP" in one["flags"]}
    losses = _losses(call("nft", "list", "ruleset", within=plan.switch)) if find_program("nft") else {}

    def link(host: int, rail: int) -> Link:
        port = plan.port(host, rail)
        state = losses.get(port, UP) if port in up else DOWN
        return Link(host, rail, plan.address(host, rail), rates.get(port), state)

    return [link(host, rail) for host, rail in plan.links()]


def read_uplinks(plan: Plan) -> dict[tuple[int, int], float | None]:
    """Read the rates of all uplinks from the kernel, by rack and rail."""
    rates = _shaped(call("tc", "-j", "qdisc", "show", within=plan.switch)) if plan.racks > 1 else {}
    return {one: rates.get(plan.uplink(*one)[0]) for one in plan.uplinks()}


def _losses(rules: str) -> dict[str, str]:
    found = re.findall(rf"table netdev (\S+) .*?(?:mod {PARTS} < (\d+) )?drop", rules, re.DOTALL)
    return {port: f"loss {int(parts) * 100 / PARTS:g} %" if parts else SILENT for port, parts in found}


# A kernel default that paces, such as bbr, would be measured instead of the link.
CONGESTION_CONTROL = "cubic"


def build(plan: Plan, rate: float | None, uplink: float | None = None) -> None:
    """Create the switch of each rack, the hosts, and the links between them."""
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
    route = ["dev", interface, "src", address, "congctl", CONGESTION_CONTROL]
    call("ip", "-n", namespace, "route", "replace", plan.network(rail), *route)


def _connect(plan: Plan, port: str, bridge: str, namespace: str, interface: str) -> None:
    peer = ["peer", "name", interface, "netns", namespace]
    call("ip", "link", "add", port, "netns", plan.switch, "type", "veth", *peer)
    call("ip", "-n", plan.switch, "link", "set", port, "master", bridge, "up")
    call("ip", "-n", namespace, "link", "set", interface, "up")


def _give_address(namespace: str, interface: str, address: str) -> None:
    call("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", interface)


def remove(name: str) -> tuple[int, int]:
    """End the processes inside a cluster and remove its namespaces; return the numbers of both."""
    namespaces = namespaces_of(name)
    processes = within(namespaces)
    end(lambda: within(namespaces))
    for namespace in namespaces:
        call("ip", "netns", "del", namespace)
    return len(processes), len(namespaces)
