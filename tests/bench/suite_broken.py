"""Runs the benchmarks with a codec that claims to be lossless, and is not."""

from __future__ import annotations

import sys

from mpi_gpucomp.codec import register
from mpi_gpucomp.codec.bound import Bound
from osu_bench.command import main


class Broken(Bound):
    name = "broken"
    lossless = True

    def __init__(self) -> None:
        super().__init__(abs=1e-2)

    @property
    def spec(self) -> str:
        return "broken"


register("broken", lambda parameters: Broken(), "to be found out")
sys.exit(main())
