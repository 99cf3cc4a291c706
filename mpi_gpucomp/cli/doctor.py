"""The command `doctor`: prints what this machine and job have, compares the ranks, and checks what was asked for.

It runs without MPI, too. Under mpirun rank 0 prints one page; a fact that is not the same on all ranks is printed by
rank. The exit code is 1 if something that a setting asks for is missing.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import socket
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mpi_gpucomp import __version__, config
from mpi_gpucomp.cli.command import Command, add_options, allgather_json, table
from mpi_gpucomp.device import get_device
from mpi_gpucomp.device.library import host_library
from mpi_gpucomp.errors import DeviceError, GpucompError, SpecError
from mpi_gpucomp.transport import gpu_aware, selection
from mpi_gpucomp.transport.rails import backends, discovery

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterable, Sequence

    from mpi_gpucomp.device import Device
    from mpi_gpucomp.device.cuda import CudaDevice

__all__ = ["COMMAND", "describe_gpu", "describe_library", "first_gpu", "page"]

LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")
"""Set by mpirun, mpiexec or srun."""
THREAD_LEVELS = ("MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")
VISIBLE = "CUDA_VISIBLE_DEVICES"
OPTIONAL = {"cramjam": "cramjam", "highspy": "highspy", "torch": "PyTorch"}
FILES = (config.LOG, config.CSV, config.PROMETHEUS)
"""The settings that are names of files."""
PROBE_SECONDS = 60
CLASS_NET = Path("/sys/class/net")

Facts = dict[str, str]


def first_gpu() -> Device | DeviceError:
    """Return the first GPU, or the reason why there is none."""
    try:
        return get_device("cuda:0")
    except DeviceError as error:
        return error


def describe_gpu(gpu: Device | DeviceError) -> str:
    """Return the name of the first GPU and the number of GPUs, or the reason why there is none."""
    if isinstance(gpu, DeviceError):
        return f"none. {gpu}"
    runtime = cast("CudaDevice", gpu).cupy.cuda.runtime
    name = runtime.getDeviceProperties(0)["name"].decode()
    return f"{name} as {gpu.name}, {runtime.getDeviceCount()} in all"


def describe_library() -> str:
    """Return the build and the path of the host library, or the reason why there is none."""
    try:
        library = host_library()
    except DeviceError as error:
        return f"none. {error}"
    return f"{library.level}, {library.path}"


class _Report:
    """The facts about one rank, in sections; and the problems and warnings that they show."""

    def __init__(self) -> None:
        self.sections: dict[str, Facts] = {}
        self.settings: dict[str, config.Resolved[Any]] = {}
        self.problems: list[str] = []
        self.warnings: list[str] = []

    def as_json(self) -> dict[str, Any]:
        """Return the report in types that JSON has."""
        settings = {name: {"value": one.value, "source": one.source} for name, one in self.settings.items()}
        return {**self.sections, "settings": settings, "problems": self.problems, "warnings": self.warnings}


def _run(args: Namespace) -> int:
    comm, mpi_facts = _start_mpi()
    report = _Report()
    report.sections["software"] = {
        "mpi_gpucomp": __version__,
        "Python": f"{platform.python_version()}, {sys.executable}",
        "host": f"{socket.gethostname()}, {platform.platform()}",
    }
    _add_settings(report)
    report.sections["MPI"] = mpi_facts
    if comm is not None:
        _add_gpu_awareness(report)
    elif _launched():
        report.problems.append(f"MPI: {mpi_facts['MPI library']}")
    _add_devices(report)
    _add_network(report)
    own = report.as_json()
    reports = [own] if comm is None else allgather_json(comm, own)
    if comm is None or comm.rank == 0:
        print(json.dumps({"ranks": reports}, indent=2) if args.json else page(reports))
    return 1 if any(one["problems"] for one in reports) else 0


def _launched() -> bool:
    return any(name in os.environ for name in LAUNCHER_VARIABLES)


def _start_mpi() -> tuple[Any, Facts]:
    """Return MPI.COMM_WORLD, or None if MPI does not start, and the facts about the MPI library."""
    try:
        facts = {"mpi4py": version("mpi4py")}
    except PackageNotFoundError:
        return None, {"mpi4py": "not installed", "MPI library": "none: mpi4py is not installed"}
    if not _launched():
        # A failing MPI_Init aborts the process, so it is tried in another one. A launcher allows only one attempt.
        program = [sys.executable, "-c", "from mpi4py import MPI"]
        try:
            done = subprocess.run(program, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
            failure = _last_line(done.stderr) if done.returncode else ""
        except subprocess.TimeoutExpired:
            failure = f"MPI_Init does not return within {PROBE_SECONDS} s"
        if failure:
            return None, facts | {"MPI library": f"none: {failure}"}
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return None, facts | {"MPI library": f"none: {_last_line(str(error))}"}
    name = " ".join(MPI.Get_library_version().replace("\0", "").split("\n")[0].partition(",")[0].split())
    facts["MPI library"] = f"{name}, {_library_path(MPI.__file__) or 'path unknown'}"
    if (transport := gpu_aware.describe_transport(MPI.__file__)) is not None:
        facts["PML"] = transport
    facts["MPI standard"] = ".".join(map(str, MPI.Get_version()))
    facts["thread level"] = THREAD_LEVELS[MPI.Query_thread()]
    return MPI.COMM_WORLD, facts


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.replace("\0", "").splitlines() if line.strip(" -\t")]
    return lines[-1] if lines else "no error message"


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _library_path(extension: str) -> str | None:
    """Return the file of the MPI library that mpi4py's extension module is linked to."""
    try:
        function = ctypes.cast(ctypes.CDLL(extension).MPI_Init, ctypes.c_void_p)
        info = _DlInfo()
        return info.file.decode() if ctypes.CDLL(None).dladdr(function, ctypes.byref(info)) else None
    except (OSError, AttributeError):
        return None


def _add_settings(report: _Report) -> None:
    for setting in config.SETTINGS:
        try:
            report.settings[setting.variable] = setting.resolve()
        except SpecError as error:
            report.problems.append(str(error))
    for name, close in config.unknown_variables().items():
        report.warnings.append(f"{name} is not a setting" + (f"; did you mean {close}?" if close else ""))
    for setting in (config.MONITOR, config.FLIGHT, *FILES):
        path = report.settings.get(setting.variable, config.Resolved(None, "")).value
        if isinstance(path, str) and not _can_write(Path(path).parent if setting in FILES else Path(path)):
            report.problems.append(f"{setting.variable}: cannot write to {path}")


def _can_write(directory: Path) -> bool:
    """Return True if the directory can be written to, or created."""
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _add_gpu_awareness(report: _Report) -> None:
    if config.CUDA_AWARE.variable not in report.settings:
        return  # an invalid value, which is a problem already
    answer, detected = gpu_aware.cuda_aware(), gpu_aware.detect()
    report.sections["MPI"]["GPU-aware"] = f"{'yes' if answer.aware else 'no'}: {answer.why}"
    if answer.aware and not detected.aware:
        report.problems.append(f"{config.CUDA_AWARE.variable} is 1, but MPI is not GPU-aware: {detected.why}")


def _add_devices(report: _Report) -> None:
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    facts = {"cores": f"{len(affinity(0))} usable of {os.cpu_count()}" if affinity else str(os.cpu_count())}
    facts |= {"host library": describe_library(), "GPUs": describe_gpu(first_gpu())}
    facts[VISIBLE] = os.environ.get(VISIBLE, "not set: this rank sees all GPUs")
    if facts["host library"].startswith("none. "):
        report.problems.append(facts["host library"].removeprefix("none. "))
    facts["CuPy"] = _version("cupy")
    facts["NVRTC"] = _nvrtc_version()
    facts["nvCOMP"] = _version("nvidia.nvcomp")
    facts |= {name: _installed(package) for package, name in OPTIONAL.items()}
    report.sections["devices and packages"] = facts


def _version(module: str) -> str:
    """Import a module and return its version, or the reason why it cannot be imported."""
    try:
        return str(import_module(module).__version__)
    except Exception as error:  # a broken installation may raise anything
        return f"none: {_last_line(str(error))}"


def _nvrtc_version() -> str:
    try:
        return ".".join(map(str, import_module("cupy_backends.cuda.libs.nvrtc").getVersion()))
    except Exception as error:  # as above, and NVRTC's own errors
        return f"none: {_last_line(str(error))}"


def _installed(package: str) -> str:
    """Return the version of a package that takes long to import."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _add_network(report: _Report) -> None:
    addresses = discovery.addresses()
    facts = {name: _describe_device(name, addresses.get(name)) for _, name in socket.if_nameindex()}
    report.sections["network devices"] = facts
    ucx = backends.probe_capabilities(backends.UCX, ())
    report.sections["wires"] = {
        "between hosts": _wire_between_hosts(report),
        "ucx": ucx.version if ucx.has_ucx else f"none: {ucx.version}",
    }
    wire = report.settings.get(config.RAIL_WIRE.variable)
    if wire is not None and wire.value == backends.UCX and not ucx.has_ucx:
        report.problems.append(f"{config.RAIL_WIRE.variable} is ucx, but UCX is not available: {ucx.version}")
    rails = report.settings.get(config.RAILS.variable)
    for name in rails.value.replace("+", ",").split(",") if rails is not None and rails.value else ():
        try:
            rail = discovery.find_rail(name.strip(), 0)
        except GpucompError as error:
            report.problems.append(f"{config.RAILS.variable}: no network device {name.strip()}. {error.remedy}")
        else:
            if not rail.has_carrier():
                report.warnings.append(f"{config.RAILS.variable}: {name.strip()} has no carrier")


def _wire_between_hosts(report: _Report) -> str:
    """Return the wire that hosts like this one would use, and why."""
    setting = report.settings.get(config.WIRE.variable)
    aware = sys.modules.get("mpi4py.MPI") is not None and gpu_aware.cuda_aware().aware
    facts = selection.HostFacts.of_this_host(cuda_aware=aware)
    try:
        found = selection.select([facts, facts], 2, config.WIRE.default if setting is None else setting.value)
    except GpucompError as error:
        report.problems.append(f"{config.WIRE.variable}: {error}")
        return f"none: {error.got}"
    return f"{found.kind}: {found.why}"


def _describe_device(name: str, address: str | None) -> str:
    speed = _read_int(CLASS_NET / name / "speed")
    parts = [
        "carrier" if _read_int(CLASS_NET / name / "carrier") == 1 else "no carrier",
        f"{speed / 1000:g} Gbit/s" if speed > 0 else "speed unknown",
        address or "no IP address",
    ]
    ports = [path.name for path in (CLASS_NET / name / "device").glob("infiniband/*")]
    return ", ".join(parts + ([f"RDMA {' '.join(ports)}"] if ports else []))


def _read_int(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such device, one that is down, or a virtual one
        return -1


def page(reports: Sequence[dict[str, Any]]) -> str:
    """Return the page about all ranks; a fact that differs between ranks has a line for each group of ranks."""
    sections = [name for name, facts in reports[0].items() if name not in ("settings", "problems", "warnings")]
    lines = [f"{len(reports)} rank{'s' * (len(reports) > 1)}"]
    for section in sections:
        lines += ["", section]
        rows = _compare([report[section] for report in reports])
        lines += [f"  {line}" for line in table(("", ""), rows).splitlines()[1:]]
    settings = [{name: _text(name, one) for name, one in report["settings"].items()} for report in reports]
    lines += ["", "settings", *(f"  {line}" for line in table(("", ""), _compare(settings)).splitlines()[1:])]
    for kind in ("warnings", "problems"):
        groups = _by_text((text, rank) for rank, report in enumerate(reports) for text in report[kind])
        texts = [f"  {_prefix(ranks, len(reports))}{text}" for text, ranks in groups.items()]
        lines += ["", kind, *(texts or ["  none"])]
    return "\n".join(lines)


def _text(variable: str, setting: dict[str, Any]) -> str:
    value, source = setting["value"], setting["source"]
    texts = {one.variable: one.default_text for one in config.SETTINGS}
    if source == config.DEFAULT and texts.get(variable):
        value = texts[variable]
    elif isinstance(value, bool):
        value = "on" if value else "off"
    return f"{value} ({source})"


def _compare(facts: Sequence[Facts]) -> list[tuple[str, str]]:
    """Return a row for each fact, or one for each group of ranks that agree on it."""
    rows: list[tuple[str, str]] = []
    for key in dict.fromkeys(key for one in facts for key in one):
        groups = _by_text((one.get(key, "-"), rank) for rank, one in enumerate(facts))
        for number, (text, ranks) in enumerate(groups.items()):
            rows.append(("" if number else key, f"{_prefix(ranks, len(facts))}{text}"))
    return rows


def _by_text(items: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for text, rank in items:
        groups.setdefault(text, []).append(rank)
    return groups


def _prefix(ranks: Sequence[int], size: int) -> str:
    """Return the ranks that a line is about, in ranges; nothing if it is about all."""
    if len(ranks) == size:
        return ""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}: "


def _add_arguments(parser: ArgumentParser) -> None:
    add_options(parser, "--json")


COMMAND = Command(
    "doctor",
    "print what this machine and job have, compare the ranks, and check the settings",
    "",
    _add_arguments,
    _run,
    mpirun=4,
)
