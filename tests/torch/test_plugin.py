"""The entry point that `import torch` calls: it registers the backend, and leaves the rest of torch as it was."""

from __future__ import annotations

import configparser
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch import ROOT, needs_mpirun, run
from mpi4py import MPI

pytest.importorskip("torch", reason="torch is not installed")

LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "SLURM_", "MPI_LOCALRANKID")
TORCH = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")

SNAPSHOT = """
import importlib, sys
import torch.distributed as dist
from torch.distributed import distributed_c10d
rendezvous = importlib.import_module("torch.distributed.rendezvous")

def functions():
    for module in (dist, distributed_c10d, rendezvous):
        for name, value in vars(module).items():
            if callable(value):
                yield f"{module.__name__}.{name}", value
    for name, value in vars(dist.Backend).items():
        if not name.startswith("__"):
            yield f"Backend.{name}", value
    for scheme, handler in rendezvous._rendezvous_handlers.items():
        yield f"{scheme}://", handler
"""

IDENTITY = f"""{SNAPSHOT}
import torch
tables = ("backend_list", "backend_capability", "backend_type_map", "default_device_backend_map", "_plugins")
before = dict(functions())
content = {{name: list(getattr(dist.Backend, name)) for name in tables}}
torch._import_device_backends()
after = dict(functions())
print(sorted(name for name in before if after[name] is not before[name]))
print(sorted(after.keys() - before.keys()))
print({{name: [key for key in getattr(dist.Backend, name) if key not in content[name]] for name in tables}})
print(dist.Backend.default_device_backend_map)
print("mpi_gpucomp.torch" in sys.modules, "mpi4py" in sys.modules)
"""

DEFINITIONS = f"""{SNAPSHOT}
import json
def definition(value):
    code = getattr(value, "__code__", None)
    where = (code.co_filename, code.co_firstlineno) if code else type(value).__name__
    return getattr(value, "__module__", None), getattr(value, "__qualname__", None), where
print(json.dumps({{name: definition(value) for name, value in functions() if callable(value)}}, sort_keys=True))
"""

GLOO = "import torch.distributed as dist; dist.init_process_group('gloo')"
NO_MASTER = (
    "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, "
    "but not set"
)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return a directory with the metadata of the installed package, whose entry points torch loads."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    info = tmp_path / "mpi_gpucomp-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mpi_gpucomp\nVersion: 0\n")
    entry_points = setup["options.entry_points"]["torch.backends"].strip()
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{entry_points}\n")
    return tmp_path


def python(
    code: str, installed: Path | None, *, autoload: bool = True, added: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter without a launcher; torch finds the package only if it is `installed`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS) and name not in TORCH}
    path = os.pathsep.join([*([str(installed)] if installed else []), str(ROOT)])
    environment = {**kept, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(autoload)), **(added or {})}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


def output(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


def test_entry_point_adds_a_name_and_replaces_nothing(installed: Path) -> None:
    replaced, added, entries, defaults, imported = output(python(IDENTITY, installed, autoload=False))
    assert replaced == "[]"
    assert added == "['Backend.GPUCOMP']"
    assert entries == str(
        {
            "backend_list": ["gpucomp"],
            "backend_capability": ["gpucomp"],
            "backend_type_map": ["gpucomp"],
            "default_device_backend_map": [],
            "_plugins": ["GPUCOMP"],
        }
    )
    assert defaults == "{'cpu': 'gloo', 'cuda': 'nccl', 'xpu': 'xccl', 'mps': 'gloo'}"
    assert imported == "False False"


def test_torch_is_the_same_in_interpreters_with_and_without_the_package(installed: Path) -> None:
    def definitions(*where: Any, **how: Any) -> Any:
        (line,) = output(python(DEFINITIONS, *where, **how))
        return json.loads(line)

    assert definitions(installed) == definitions(None, autoload=False)


def test_gloo_program_without_master_addr_gets_the_error_of_torch(installed: Path) -> None:
    for done in (python(GLOO, installed), python(GLOO, None, autoload=False)):
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == NO_MASTER
        assert "mpi_gpucomp" not in done.stderr


def test_import_of_the_package_keeps_the_error_of_torch_without_a_launcher(installed: Path) -> None:
    done = python(f"import mpi_gpucomp.torch; {GLOO}", installed)
    assert done.stderr.splitlines()[-1] == NO_MASTER


@pytest.mark.parametrize("first", ["torch", "mpi_gpucomp.torch", "mpi_gpucomp._torch_plugin"])
def test_import_registers_the_backend_and_does_not_initialise_mpi(installed: Path, first: str) -> None:
    code = f"import sys, {first}, torch.distributed as dist; print('gpucomp' in dist.Backend.backend_list)"
    assert output(python(f"{code}; print('mpi4py' in sys.modules)", installed)) == ["True", "False"]


def test_library_does_not_import_torch() -> None:
    code = "import sys, mpi_gpucomp, mpi_gpucomp.codec, mpi_gpucomp.schedule; print('torch' in sys.modules)"
    assert output(python(code, None)) == ["False"]


def test_mpi_rendezvous_without_a_launcher_is_an_error(installed: Path) -> None:
    group = "import mpi_gpucomp.torch, torch.distributed as d; d.init_process_group('gpucomp', init_method='mpi://')"
    done = python(group, installed)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "mpi_gpucomp.errors.DeviceError: torch.distributed, backend gpucomp: expected a process started by an MPI "
        "launcher, got a process started without one. Run it as `mpirun -n 4 python ...`; for one rank, as "
        "`mpirun -n 1 python ...`."
    )


SRUN = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "2"}
TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "TORCHELASTIC_RUN_ID": "0"}
WRONG_WORLD = (
    "mpi_gpucomp.errors.DeviceError: rank 0: {}: expected an MPI world of {} ranks, as {} says, got an MPI world of 1. "
    "Start the program with the mpirun of {}, or with srun and the --mpi option for it; torchrun does not connect "
    "processes by MPI."
)


@pytest.mark.parametrize(
    ("program", "launcher", "topic", "size", "variable"),
    [
        ("torch.distributed.init_process_group('gpucomp')", SRUN, "init_process_group", 4, "SLURM_NTASKS"),
        ("torch.distributed.init_process_group('gloo')", SRUN, "init_process_group", 4, "SLURM_NTASKS"),
        ("g.sync_parameters(torch.nn.Linear(2, 2))", SRUN, "communicator of all MPI ranks", 4, "SLURM_NTASKS"),
        ("g.sync_parameters(torch.nn.Linear(2, 2))", TORCHRUN, "communicator of all MPI ranks", 2, "WORLD_SIZE"),
    ],
    ids=["srun-gpucomp", "srun-gloo", "srun-sync", "torchrun-sync"],
)
def test_processes_that_mpi_does_not_connect_are_an_error(
    installed: Path, program: str, launcher: dict[str, str], topic: str, size: int, variable: str
) -> None:
    done = python(f"import torch, mpi_gpucomp.torch as g; {program}", installed, added=launcher)
    assert done.returncode == 1
    library, version = MPI.get_vendor()
    mpi = f"{library} {'.'.join(map(str, version))}"
    assert done.stderr.splitlines()[-1] == WRONG_WORLD.format(topic, size, variable, mpi)


def test_slurm_allocation_without_a_step_is_no_launcher(installed: Path) -> None:
    sync = "g.sync_parameters(torch.nn.Linear(2, 2))"
    code = f"import os, torch, mpi_gpucomp.torch as g; {sync}; print(os.environ.get('LOCAL_RANK'))"
    allocation = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    assert output(python(code, installed, added=allocation)) == ["None"]


@needs_mpirun
def test_local_rank_is_set_under_mpirun() -> None:
    imported = "import os, mpi_gpucomp.torch; print(os.environ['LOCAL_RANK'])"
    assert sorted(output(run(2, "-c", imported))) == ["0", "1"]
    # By the rendezvous, if the launcher has no variable for it; and a value that is set stays.
    for before, expected in (("None", ["0", "1"]), ("'7'", ["7", "7"])):
        code = (
            "import os\n"
            "for name in ('OMPI_COMM_WORLD_LOCAL_RANK', 'MPI_LOCALRANKID'): os.environ.pop(name, None)\n"
            f"if {before}: os.environ['LOCAL_RANK'] = {before}\n"
            "import mpi_gpucomp.torch, torch.distributed as d; d.init_process_group('gpucomp')\n"
            "print(os.environ['LOCAL_RANK']); d.destroy_process_group()"
        )
        assert sorted(output(run(2, "-c", code))) == expected


GROUP = "import sys; sys.path.insert(0, {installed!r}); {imports}; import torch.distributed as dist; dist.{create}; "
REPORT = "dist.barrier(); print(dist.get_backend(), dist.get_world_size()); dist.destroy_process_group()"


@needs_mpirun
@pytest.mark.parametrize(
    ("imports", "create"),
    [
        ("import mpi_gpucomp.torch", "init_process_group('gpucomp', init_method='mpi://')"),
        ("import mpi_gpucomp.torch", "init_process_group('gpucomp')"),
    ],
    ids=["mpi-scheme", "import"],
)
def test_process_group_under_mpirun_needs_no_master_addr(installed: Path, imports: str, create: str) -> None:
    code = GROUP.format(installed=str(installed), imports=imports, create=create) + REPORT
    assert output(run(2, "-c", code)) == ["gpucomp 2"] * 2
