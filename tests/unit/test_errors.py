"""Errors are MPI.Exceptions too where mpi4py.MPI is imported, and need no MPI elsewhere."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
from mpi4py import MPI

from mpi_gpucomp import errors
from mpi_gpucomp.errors import DeadlockError, GpucompError, RankFailedError, SpecError

PARTS = {"expected": "one", "got": "two", "remedy": "Pass one.", "rank": 3}
TEXT = "rank 3: topic: expected one, got two. Pass one."
ALL = [getattr(errors, name) for name in errors.__all__]
BUILTINS = (ValueError, TypeError, RuntimeError, TimeoutError, ConnectionError)


@pytest.mark.parametrize("kind", ALL)
def test_error_is_an_mpi_exception_and_what_it_was(kind: Any) -> None:
    error = kind("topic", **PARTS)
    assert isinstance(error, kind) and isinstance(error, MPI.Exception)
    assert all(isinstance(error, base) for base in BUILTINS if issubclass(kind, base))
    assert (type(error).__name__, type(error).__module__) == (kind.__name__, "mpi_gpucomp.errors")
    assert (str(error), error.args, error.rank) == (TEXT, (TEXT,), 3)
    assert repr(error) == f"{kind.__name__}({TEXT!r})"
    with pytest.raises(MPI.Exception, match="topic: expected one"):
        raise error


def test_error_has_a_class_of_mpi() -> None:
    classes = {kind.__name__: kind("topic", **PARTS).Get_error_class() for kind in ALL}
    expected = {
        "SpecError": MPI.ERR_ARG,
        "BufferSpecError": MPI.ERR_BUFFER,
        "ScheduleError": MPI.ERR_ARG,
        "AgreementError": MPI.ERR_ARG,
        "RankFailedError": getattr(MPI, "ERR_PROC_FAILED", MPI.ERR_OTHER),
    }
    assert classes == {name: MPI.ERR_OTHER for name in classes} | expected
    error: Any = SpecError("topic", **PARTS)
    assert error.Get_error_code() == error.error_code == error.error_class == int(error) == MPI.ERR_ARG
    assert error.Get_error_string() == error.error_string == TEXT
    assert error and error == MPI.ERR_ARG and hash(error) == hash(MPI.Exception(MPI.ERR_ARG))


@pytest.mark.parametrize("kind", [SpecError, DeadlockError, RankFailedError])
@pytest.mark.parametrize("duplicate", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_error_may_be_copied_and_pickled(kind: Any, duplicate: Any) -> None:
    error = duplicate(kind("topic", **PARTS))
    assert isinstance(error, kind) and isinstance(error, MPI.Exception)
    assert (str(error), error.remedy) == (TEXT, "Pass one.")


def test_subclass_of_a_program_is_one_too() -> None:
    class Own(GpucompError, KeyError):
        """An error of a codec outside of the package."""

    error = Own("topic", **PARTS)
    assert isinstance(error, Own) and isinstance(error, KeyError) and isinstance(error, MPI.Exception)
    assert str(error) == TEXT


def test_no_mpi_is_imported_for_an_error() -> None:
    code = (
        "import sys; from mpi_gpucomp.errors import DeadlockError\n"
        "make = lambda: DeadlockError('topic', expected='one', got='two', remedy='Pass one.')\n"
        "error = make(); print(error, type(error) is DeadlockError, 'mpi4py' in sys.modules)\n"
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI\n"
        "print(isinstance(make(), MPI.Exception), make().Get_error_class() == MPI.ERR_OTHER)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["topic: expected one, got two. Pass one. True False", "True True"], done.stderr
