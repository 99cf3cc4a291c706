"""Algorithms made for a topology: routed, ordered and joined by a solver, then lowered to a schedule like any other."""

from mpi_gpucomp.schedule.synth.make import Synthesis, synthesise

__all__ = ["Synthesis", "synthesise"]
