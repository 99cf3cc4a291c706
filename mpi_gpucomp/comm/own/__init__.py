"""The best of MPI's own: the algorithms that its library has, how to choose among them, and which is fastest here.

Libraries choose by tables made for other networks. Open MPI's default broadcast of a large message among four hosts at
1 Gbit/s takes three times as long as its own pipeline.
"""

from mpi_gpucomp.comm.own.algorithms import DEFAULT, Candidate, candidates
from mpi_gpucomp.comm.own.tuned import Better, Tuned, keeps_settings

__all__ = ["DEFAULT", "Better", "Candidate", "Tuned", "candidates", "keeps_settings"]
