"""The links between hosts and switch: shaped, cut, healed, and read back from the kernel."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from mpi_gpucomp.errors import SpecError
from osu_bench.cluster.plan import Plan
from osu_bench.cluster.rate import shaping
from osu_bench.cluster.system import call

__all__ = ["DOWN", "SILENT", "UP", "Link", "cut", "heal", "read", "read_uplinks", "shape", "shape_uplink"]

UP, DOWN, SILENT = "up", "down", "silent"
PARTS = 10_000
"""Losses are counted in parts of so many."""


@dataclass(frozen=True)
class Link:
    """A host's link on one rail, as it is now."""

    host: int
    rail: int
    address: str
    rate: float | None
    """Bits a second each way; None where nothing limits it."""
    state: str = UP
    """UP; DOWN, where both ends know; SILENT, where packets vanish; or `loss 25 %`."""


def shape(plan: Plan, host: int, rail: int, rate: float | None) -> None:
    """Hold both ends of a link to a rate, or to none."""
    for namespace, interface in _ends(plan, host, rail):
        _hold(namespace, interface, rate)


def shape_uplink(plan: Plan, rack: int, rail: int, rate: float | None) -> None:
    """Hold both ends of a rack's uplink to a rate, or to none."""
    for interface in plan.uplink(rack, rail):
        _hold(plan.switch, interface, rate)


def _hold(namespace: str, interface: str, rate: float | None) -> None:
    if rate is not None:
        call("tc", "qdisc", "replace", "dev", interface, "root", *shaping(rate), within=namespace)
    elif _shaped(call("tc", "-j", "qdisc", "show", "dev", interface, within=namespace)):
        call("tc", "qdisc", "del", "dev", interface, "root", within=namespace)


def _ends(plan: Plan, host: int, rail: int) -> tuple[tuple[str, str], tuple[str, str]]:
    return (plan.switch, plan.port(host, rail)), (plan.namespace(host), plan.interface(rail))


def _shaped(said: str) -> dict[str, float]:
    """Return bits a second of the interfaces that are shaped."""
    disciplines: list[dict[str, Any]] = json.loads(said)
    return {one.get("dev", ""): one["options"]["rate"] * 8.0 for one in disciplines if one["kind"] == "tbf"}


def cut(plan: Plan, host: int, rail: int, how: str | float = DOWN) -> None:
    """Take a link down as if its cable were pulled, or let all (SILENT) or so many percent of its packets vanish.

    What vanishes is what the kernel hands on in one piece, up to 64 KiB of a stream.
    """
    loss = _loss(how)
    heal(plan, host, rail)
    if loss is None:
        # The switch's end: the host's own loses its carrier, and keeps its address and its routes.
        call("ip", "-n", plan.switch, "link", "set", plan.port(host, rail), "down")
        return
    for namespace, interface in _ends(plan, host, rail):
        call("nft", "-f", "-", within=namespace, text=_rules(interface, loss))


def _loss(how: str | float) -> int | None:
    """Return how many of PARTS vanish, or None for a link that is taken down."""
    if isinstance(how, str):
        known = {DOWN: None, SILENT: PARTS}
        if how in known:
            return known[how]
    elif 100 / PARTS <= how <= 100:
        return round(how * PARTS / 100)
    expected = f"{DOWN}, {SILENT}, or the percentage of packets to lose, from 0.01 to 100"
    raise SpecError("cut of a link", expected=expected, got=f"{how!r}", remedy="Choose one of these.")


def _rules(interface: str, loss: int) -> str:
    share = f"numgen random mod {PARTS} < {loss} " if loss < PARTS else ""
    hook = f'type filter hook ingress device "{interface}" priority 0; policy accept;'
    return f"table netdev {interface} {{ chain arriving {{ {hook} {share}drop; }}; }}\n"


def heal(plan: Plan, host: int, rail: int) -> None:
    """Undo every kind of cut."""
    for namespace, interface in _ends(plan, host, rail):
        # Only a table that is there can be deleted; adding one that is there does nothing.
        table = f"table netdev {interface}"
        call("nft", "-f", "-", within=namespace, text=f"add {table}\ndelete {table}\n")
    call("ip", "-n", plan.switch, "link", "set", plan.port(host, rail), "up")


def read(plan: Plan) -> list[Link]:
    """Return all links as the kernel has them."""
    rates = _shaped(call("tc", "-j", "qdisc", "show", within=plan.switch))
    interfaces = json.loads(call("ip", "-j", "-n", plan.switch, "link", "show"))
    up = {one["ifname"] for one in interfaces if "UP" in one["flags"]}
    losses = _losses(call("nft", "list", "ruleset", within=plan.switch))

    def link(host: int, rail: int) -> Link:
        port = plan.port(host, rail)
        state = losses.get(port, UP) if port in up else DOWN
        return Link(host, rail, plan.address(host, rail), rates.get(port), state)

    return [link(host, rail) for host, rail in plan.links()]


def read_uplinks(plan: Plan) -> dict[tuple[int, int], float | None]:
    """Return the rates of all uplinks, by rack and rail, as the kernel has them."""
    rates = _shaped(call("tc", "-j", "qdisc", "show", within=plan.switch)) if plan.racks > 1 else {}
    return {one: rates.get(plan.uplink(*one)[0]) for one in plan.uplinks()}


def _losses(rules: str) -> dict[str, str]:
    found = re.findall(rf"table netdev (\S+) .*?(?:mod {PARTS} < (\d+) )?drop", rules, re.DOTALL)
    return {port: f"loss {int(parts) * 100 / PARTS:g} %" if parts else SILENT for port, parts in found}
