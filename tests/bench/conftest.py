"""The fixture `mpich` of the MPI tests, for the benchmarks too."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

MPI_TESTS = Path(__file__).parents[1] / "mpi"

if str(MPI_TESTS) not in sys.path:
    sys.path.append(str(MPI_TESTS))
_spec = spec_from_file_location("mpi_conftest", MPI_TESTS / "conftest.py")
assert _spec is not None and _spec.loader is not None
_module = module_from_spec(_spec)
_spec.loader.exec_module(_module)

mpich = _module.mpich
