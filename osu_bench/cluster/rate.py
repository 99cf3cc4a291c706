"""The rate of a link: how it is written, and the shaping that holds a link to it."""

from __future__ import annotations

import re

from mpi_gpucomp.errors import SpecError

__all__ = ["Rate", "in_words", "parse_rate", "shaping"]

Rate = str | float | None
"""Bits a second, also as text such as 1gbit; None, 0 and `unlimited` are a link that nothing limits."""

UNITS = {"": 1.0, "bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
LEAST, MOST = 1e5, 1e12

# The bucket lets through at full speed what it holds. It must hold more than one packet of 64 KiB, in which the
# kernel hands on TCP's segments, and what the rate gives until the kernel looks again: with 64 KiB a stream lost
# packets, and about a third of its rate at 5 Gbit/s. But all of it is a gift to the first message after a pause: with
# 256 KiB, a message of 256 KiB took 7 to 44 % of the time that the rate demands and one of 1 MiB 80 to 85 %, with 96
# KiB they took 72 to 91 % and 96 to 101 %. With 96 KiB streams carry 93 to 96 % of the rate (headers are 4 %) at 0.5,
# 1 and 5 Gbit/s; htb measured the same as tbf. Steps of 4 ms in short messages are not the shaping's: they come while
# processes spin on all cores, with either discipline, and to messages that never wait for the bucket; they are as
# long as the scheduler's tick.
LEAST_BURST = 96 << 10
BURST_SECONDS = 150e-6

# A queue that holds the largest window of one TCP connection (tcp_rmem's usual 6 MB): a lone stream loses nothing.
QUEUE_BYTES = 8 << 20


def parse_rate(rate: Rate) -> float | None:
    """Return a rate in bits a second, or None for a link that nothing limits."""
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


def in_words(rate: float | None) -> str:
    """Write a rate in the largest unit that leaves a number of at least one."""
    if rate is None:
        return "unlimited"
    unit = next(name for name, size in reversed(UNITS.items()) if rate >= size)
    return f"{rate / UNITS[unit]:g}{unit}"


def shaping(rate: float) -> list[str]:
    """Return what makes `tc` hold a link to a rate."""
    burst = max(LEAST_BURST, round(rate / 8 * BURST_SECONDS))
    return ["tbf", "rate", f"{rate:.0f}bit", "burst", str(burst), "limit", str(QUEUE_BYTES)]
