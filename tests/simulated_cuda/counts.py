"""What each kernel does per byte of elements, and what an A100 could then do at most: a model, never a measurement.

`python -m tests.simulated_cuda counts` interprets the kernels' PTX and prints a table in Markdown, for docs/GPU.md.
Lanes that diverge meet again as soon as they can, as they do on a GPU.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator

from mpi_gpucomp.device import get_device

from .cupy_standin import install
from .every_kernel import Work, every_work
from .machine import SETTINGS, machine

__all__ = ["main", "rows"]

COUNT = 1 << 19
KIB, MIB = 1 << 10, 1 << 20
SHOWN = (
    *("zfp:rate=8 float32", "bound:abs=0.001 float32", "bound:rel=0.01 float32", "mpc float32", "split float32"),
    *("split bfloat16", "cast:bf16 float32", "delta float32", "reduce float32", "pack 4 bytes", "bucket"),
    *("checksum", "frame"),
)
"""Work in the table; other types of elements run the same code."""

# NVIDIA, "A100 Tensor Core GPU Architecture" (2020): 108 multiprocessors, each with four schedulers of one instruction
# of a warp per clock and one access to shared memory of 128 bytes per clock; boost clock 1410 MHz. NVIDIA, "A100 Tensor
# Core GPU" data sheet (2021): 2039 GB/s of memory bandwidth with 80 GB, SXM.
MULTIPROCESSORS, SCHEDULERS, CLOCK, MEMORY = 108, 4, 1.41e9, 2039e9
SECTOR, WARPS_OF_BLOCK = 32, 4

HEADER = (
    *("kernel", "in", "instructions / KiB", "lanes", "read", "written", "sectors / load", "/ store"),
    *("shared / KiB", "warps / MiB", "GB/s at most", "limit"),
)


def rows(count: int) -> Iterator[tuple[str, ...]]:
    """Do the shown work on arrays of a number of elements, and yield a row for each kernel that it launches."""
    stream = get_device("cuda:0").stream()
    for work in every_work(count):
        title, _, step = work.name.partition(" encode")
        title, _, how = title.partition(" decode")
        if title not in SHOWN or how or step:
            continue
        machine().reset_counts()
        work.run(stream)
        profiles = machine().profiles
        yield from (_row(kernel, work, counted) for kernel, counted in profiles.items())
        if len(profiles) > 1 and work.name.endswith("code"):
            seconds = sum(max(_seconds(counted).values()) for counted in profiles.values())
            yield ("**all**", work.name, *[""] * 8, f"**{work.nbytes / seconds / 1e9:.0f}**", "")


def _one_block(counted: Counter[str]) -> bool:
    return counted["warps"] == WARPS_OF_BLOCK * counted["launches"]


def _seconds(counted: Counter[str]) -> dict[str, float]:
    """Return the least time for each limit, for all launches: no cache saves an access of memory."""
    multiprocessors = 1 if _one_block(counted) else MULTIPROCESSORS
    return {
        "memory": SECTOR * (counted["load_sectors"] + counted["store_sectors"]) / MEMORY,
        "instructions": counted["instructions"] / (multiprocessors * SCHEDULERS * CLOCK),
        "shared memory": (counted["shared_cycles"] + counted["shuffles"]) / (multiprocessors * CLOCK),
    }


def _row(kernel: str, work: Work, counted: Counter[str]) -> tuple[str, ...]:
    nbytes = work.nbytes * counted["launches"]
    seconds = _seconds(counted)
    limit = max(seconds, key=lambda name: seconds[name])
    return (
        kernel,
        work.name,
        f"{counted['instructions'] * KIB / nbytes:.0f}",
        f"{counted['lanes'] / counted['instructions'] / 32:.0%}",
        f"{counted['load_bytes'] / nbytes:.2f}",
        f"{counted['store_bytes'] / nbytes:.2f}",
        _per_request(counted, "load"),
        _per_request(counted, "store"),
        f"{(counted['shared_cycles'] + counted['shuffles']) * KIB / nbytes:.0f}",
        "one block" if _one_block(counted) else f"{counted['warps'] * MIB / nbytes:.0f}",
        f"{nbytes / seconds[limit] / 1e9:.0f}",
        limit,
    )


def _per_request(counted: Counter[str], what: str) -> str:
    requests = counted[f"{what}s"]
    return f"{counted[f'{what}_sectors'] / requests:.1f}" if requests else "-"


def main() -> int:
    """Print the table."""
    os.environ[SETTINGS] = "seed=1,ptx=1000000,lockstep=1,background=0"
    install()
    found = list(rows(int(sys.argv[2]) if len(sys.argv) > 2 else COUNT))
    for line in (HEADER, ["---"] * len(HEADER), *found):
        print(f"| {' | '.join(line)} |")
    machine().check()
    return 0
