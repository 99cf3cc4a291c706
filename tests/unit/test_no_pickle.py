"""Nothing that comes from a wire or a file is unpickled: no use of pickle, direct or by a function that does it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for part in ("mpi_gpucomp", "osu_bench") for path in (ROOT / part).rglob("*.py"))
MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}
COLLECTIVES = ("bcast", "gather", "scatter", "allgather", "alltoall", "reduce", "allreduce", "scan", "exscan")
POINT_TO_POINT = ("send", "bsend", "ssend", "isend", "ibsend", "issend", "recv", "irecv", "sendrecv", "mrecv")
COMMUNICATORS = ("comm", "world", "comm_world", "comm_self", "intracomm")
"""What the names of MPI communicators end with here."""
ON_REQUEST = {
    "mpi_gpucomp/communicator.py": ["self._p2p.start_object", "self._comm.recv", "self._comm.irecv"],
    "mpi_gpucomp/_dispatch/p2p.py": ["MPI.pickle.loads", "MPI.pickle.loads"],
}
"""mpi4py's methods for objects, which trust the ranks of the job as mpi4py does."""
LOADERS = {"np.load": "allow_pickle=False", "torch.load": "weights_only=True"}


def uses(text: str) -> list[str]:
    """Return what the code does that pickles."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [f"import {module}" for module in modules if module.partition(".")[0] in MODULES]
            found += ["import pkl5"] if any("pkl5" in name for name in modules) else []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found += pickling(node, node.func)
    return found


def pickling(call: ast.Call, function: ast.Attribute) -> list[str]:
    """Return the call if it pickles: mpi4py's methods in lower case, torch's for objects, and loaders that allow it."""
    name, owner = function.attr, ast.unparse(function.value)
    of_mpi = name in COLLECTIVES + POINT_TO_POINT and owner.lower().rpartition(".")[2].endswith(COMMUNICATORS)
    of_torch = name.endswith(("_object", "_object_list"))
    keywords = {ast.unparse(keyword) for keyword in call.keywords}
    loads = LOADERS.get(f"{owner}.{name}", "") not in keywords | {""}
    by_mpi4py = name == "loads" and owner == "MPI.pickle"
    return [f"{owner}.{name}"] if of_mpi or of_torch or loads or by_mpi4py else []


def test_no_pickle() -> None:
    assert len(SOURCES) > 100
    found = {str(path.relative_to(ROOT)): uses(path.read_text()) for path in SOURCES}
    assert {path: names for path, names in found.items() if names} == ON_REQUEST


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import pickle", "import pickle"),
        ("from pickle import loads", "import pickle"),
        ("self._comm.allreduce(1)", "self._comm.allreduce"),
        ("MPI.COMM_WORLD.bcast(x)", "MPI.COMM_WORLD.bcast"),
        ("world.recv(source=1)", "world.recv"),
        ("dist.all_gather_object(x, y)", "dist.all_gather_object"),
        ("np.load(path)", "np.load"),
        ("np.load(path, allow_pickle=True)", "np.load"),
        ("torch.load(path)", "torch.load"),
    ],
)
def test_what_pickles_is_found(code: str, found: str) -> None:
    assert uses(code) == [found]


@pytest.mark.parametrize("code", ["comm.Bcast(x)", "connection.recv(1)", "np.load(path, allow_pickle=False)"])
def test_what_does_not_pickle_is_allowed(code: str) -> None:
    assert uses(code) == []
