"""How long a schedule would take on a topology: an event simulation of the engine's rules, and what it shows."""

from mpi_gpucomp.schedule.simulate.record import Record, Segment, Simulation
from mpi_gpucomp.schedule.simulate.run import simulate

__all__ = ["Record", "Segment", "Simulation", "simulate"]
