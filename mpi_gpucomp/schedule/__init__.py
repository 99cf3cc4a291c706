"""Schedules as data: which chunks move in which order; built, checked, and exchanged as MSCCL XML."""

from mpi_gpucomp.schedule.builder import ScheduleBuilder, rotate
from mpi_gpucomp.schedule.cost import TrafficCount, steps_and_bytes
from mpi_gpucomp.schedule.ir import COLLECTIVES, Algorithm, CollectiveSpec, Lane, Place, Program, Step
from mpi_gpucomp.schedule.verify import checked

__all__ = [
    "COLLECTIVES",
    "Algorithm",
    "CollectiveSpec",
    "Lane",
    "Place",
    "Program",
    "ScheduleBuilder",
    "Step",
    "TrafficCount",
    "checked",
    "rotate",
    "steps_and_bytes",
]
