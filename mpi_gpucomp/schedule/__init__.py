"""In which order chunks move: schedules as data, built, checked, and exchanged as MSCCL XML."""

from mpi_gpucomp.schedule.build import Plan, rotated
from mpi_gpucomp.schedule.check import checked
from mpi_gpucomp.schedule.goal import COLLECTIVES, Goal
from mpi_gpucomp.schedule.ir import Algorithm, Lane, Place, Program, Step
from mpi_gpucomp.schedule.traffic import Traffic, steps_and_bytes

__all__ = [
    "COLLECTIVES",
    "Algorithm",
    "Goal",
    "Lane",
    "Place",
    "Plan",
    "Program",
    "Step",
    "Traffic",
    "checked",
    "rotated",
    "steps_and_bytes",
]
