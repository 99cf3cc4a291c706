"""The command `doctor` without a launcher: facts, settings, problems, and the comparison of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpi_gpucomp import config
from mpi_gpucomp.cli.doctor import page
from mpi_gpucomp.device import library

ROOT = Path(__file__).resolve().parents[2]


def doctor(*args: str, program: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command with these variables, which have no prefix here."""
    start = ["-c", f"{program}\nfrom mpi_gpucomp.cli.main import main; raise SystemExit(main())"]
    environment = {name: text for name, text in os.environ.items() if not name.startswith("MPI_GPUCOMP_")}
    environment |= {f"MPI_GPUCOMP_{name}": text for name, text in variables.items()} | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *(start if program else ["-m", "mpi_gpucomp"]), "doctor", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment, check=False)


def rank(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the report of the only rank."""
    (only,) = json.loads(done.stdout)["ranks"]
    return dict(only)


def test_facts_about_this_machine() -> None:
    done = doctor("--json", HANG="5", WORKERS="3")
    assert (done.returncode, done.stderr) == (0, "")
    found = rank(done)
    assert found["software"]["Python"].endswith(f", {sys.executable}")
    loaded = library.host_library()
    assert found["devices and packages"]["host library"] == f"{loaded.level}, {loaded.path}"
    assert found["devices and packages"]["cores"] == f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"
    assert found["devices and packages"]["GPUs"].startswith("none. device cuda:0: expected ")
    assert "127.0.0.1" in found["network devices"]["lo"]
    assert found["settings"]["MPI_GPUCOMP_HANG"] == {"value": 5.0, "source": "environment"}
    assert found["settings"]["MPI_GPUCOMP_WORKERS"] == {"value": 3, "source": "environment"}
    assert found["settings"]["MPI_GPUCOMP_RAIL_LIMIT"] == {"value": 30.0, "source": "default"}
    assert list(found["settings"]) == [setting.variable for setting in config.SETTINGS]
    assert (found["problems"], found["warnings"]) == ([], [])


def test_a_machine_without_mpi() -> None:
    """The child process that tries MPI first fails as well: the variable hides the MPI library from both."""
    program = "import os, sys; os.environ['MPI4PY_MPIABI'] = 'none'; sys.modules['mpi4py.MPI'] = None"
    done = doctor("--json", program=program)
    assert (done.returncode, done.stderr) == (0, "")
    found = rank(done)["MPI"]
    assert found["MPI library"].startswith("none: ")
    assert "GPU-aware" not in found


def test_a_machine_without_mpi4py_under_a_launcher() -> None:
    program = "import os; os.environ['PMI_SIZE'] = '1'\nimport sys; sys.modules['mpi4py.MPI'] = None"
    done = doctor("--json", program=program)
    assert done.returncode == 1
    assert [text.partition(": ")[0] for text in rank(done)["problems"]] == ["MPI"]


@pytest.mark.parametrize(
    ("variable", "text", "problem"),
    [
        ("RAILS", "lo,nosuch0", "MPI_GPUCOMP_RAILS: no network device nosuch0. This host has lo (127.0.0.1)"),
        ("HANG", "soon", "environment variable MPI_GPUCOMP_HANG: expected a number above 0, got 'soon'. "),
        (
            "HOST_LIBRARY",
            "/nowhere/lib.so",
            "environment variable MPI_GPUCOMP_HOST_LIBRARY: expected the path of a library, got '/nowhere/lib.so', ",
        ),
        (
            "WORKERS",
            "none",
            "environment variable MPI_GPUCOMP_WORKERS: expected a whole number of at least 1, got 'none'. ",
        ),
        ("CUDA_AWARE", "1", "MPI_GPUCOMP_CUDA_AWARE is 1, but MPI is not GPU-aware: "),
        ("RAIL_WIRE", "ucx", "MPI_GPUCOMP_RAIL_WIRE is ucx, but UCX is not available: "),
        ("FLIGHT", "/dev/null/flight", "MPI_GPUCOMP_FLIGHT: cannot write to /dev/null/flight"),
        ("CSV", "/dev/null/%r.csv", "MPI_GPUCOMP_CSV: cannot write to /dev/null/%r.csv"),
    ],
)
def test_what_a_setting_asks_for_is_missing(variable: str, text: str, problem: str) -> None:
    program = "import sys; sys.modules['ucxx'] = None"
    done = doctor("--json", program=program, **{variable: text})
    assert (done.returncode, done.stderr) == (1, "")
    (found,) = rank(done)["problems"]
    assert found.startswith(problem)


def test_unknown_variables_are_warnings() -> None:
    done = doctor(RIALS="lo")
    assert (done.returncode, done.stderr) == (0, "")
    warnings = done.stdout.partition("\nwarnings\n")[2].partition("\n\n")[0]
    assert warnings == "  MPI_GPUCOMP_RIALS is not a setting; did you mean MPI_GPUCOMP_RAILS?"


def report(host: str, rails: str, *problems: str) -> dict[str, Any]:
    settings = {"MPI_GPUCOMP_RAILS": {"value": rails, "source": "environment"}}
    facts = {"mpi_gpucomp": "0.1.0", "host": host}
    return {"software": facts, "settings": settings, "problems": list(problems), "warnings": []}


def test_facts_that_differ_are_shown_by_rank() -> None:
    found = [report("a", "eth0"), report("a", "eth0"), report("b", "eth1", "broken"), report("a", "eth0", "broken")]
    assert page(found) == (
        "4 ranks\n"
        "\n"
        "software\n"
        "  mpi_gpucomp  0.1.0\n"
        "  host         ranks 0-1, 3: a\n"
        "               rank 2: b\n"
        "\n"
        "settings\n"
        "  MPI_GPUCOMP_RAILS  ranks 0-1, 3: eth0 (environment)\n"
        "                     rank 2: eth1 (environment)\n"
        "\n"
        "warnings\n"
        "  none\n"
        "\n"
        "problems\n"
        "  ranks 2-3: broken"
    )
