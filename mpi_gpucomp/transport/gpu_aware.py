"""Detects whether the MPI library in use is GPU-aware: accepts addresses of GPU memory.

A false positive ends the process at the first message; a false negative costs a copy through pinned memory. So a yes
needs evidence: the user's setting (`MPI_GPUCOMP_CUDA_AWARE`), MPI 4.1's list of memory kinds, or a query of the
library, the last only while the environment does not disable GPU memory in that library. An Open MPI that was built
with CUDA says yes even if its messages go through a UCX without CUDA, which copies with the host's instructions: then
UCX's CUDA module must be loaded, too. Ranks may get different answers: each stages its own side of a message, which its
peer does not see.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp import config

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "VARIABLE",
    "GpuAwareness",
    "by_kinds",
    "by_library",
    "by_setting",
    "by_transport",
    "cuda_aware",
    "describe_transport",
    "detect",
    "selected_pml",
]

VARIABLE = config.CUDA_AWARE.variable
KINDS = "mpi_memory_alloc_kinds"
MPIX_GPU_SUPPORT_CUDA = 0
BUILT = "opal_built_with_cuda_support"
PML = "mca_pml_base_selected_component"
"""The component of Open MPI that moves point-to-point messages, as its C structure."""
PML_BYTES = 160
UCX_CUDA = "libuct_cuda"
MAPS = Path("/proc/self/maps")

_log = logging.getLogger("mpi_gpucomp")


class GpuAwareness(NamedTuple):
    """Whether MPI accepts GPU memory, and the evidence; if not, messages are staged through pinned memory."""

    aware: bool
    why: str


class _Switch(NamedTuple):
    """The environment variable by which a family of MPI libraries enables GPU memory."""

    mark: str
    """Part of the library's version string."""
    variable: str
    default: bool
    proves: bool
    """Whether 1 proves support where the library has no query function."""


_SWITCHES = (  # the first match
    _Switch("CRAY MPICH", "MPICH_GPU_SUPPORT_ENABLED", default=False, proves=True),
    _Switch("MVAPICH2", "MV2_USE_CUDA", default=False, proves=True),
    _Switch("MVAPICH", "MVP_ENABLE_GPU", default=True, proves=True),
    _Switch("MPICH", "MPIR_CVAR_ENABLE_GPU", default=True, proves=False),
)


def cuda_aware() -> GpuAwareness:
    """Return whether MPI is GPU-aware; call it after MPI is initialised. The result is cached."""
    if (setting := by_setting(os.environ)) is not None:
        return setting
    from mpi4py import MPI  # here, because importing it initialises MPI, which the rules below do not need

    if not MPI.Is_initialized() or MPI.Is_finalized():
        return GpuAwareness(False, "MPI is not initialised, or already finalised")
    return detect()


@cache
def detect() -> GpuAwareness:
    """Return whether the MPI library is GPU-aware, ignoring the setting; MPI must be initialised."""
    from mpi4py import MPI

    found = by_kinds(_kinds())
    if found is None:
        # Symbols are looked up in the extension module, so they come from the MPI library it is linked to, and never
        # from another one in this process, which may abort when queried before it is initialised.
        found = by_library(getattr(MPI, "__file__", None), MPI.Get_library_version(), os.environ)
    found = by_transport(found, selected_pml(getattr(MPI, "__file__", None)), _mapped(), os.environ)
    _log.debug("GPU-aware MPI: %s. %s", "yes" if found.aware else "no", found.why)
    return found


def _kinds() -> str | None:
    from mpi4py import MPI

    try:
        info = MPI.COMM_WORLD.Get_info()
    except MPI.Exception:  # an old library without this query
        return None
    try:
        return info.get(KINDS)
    finally:
        info.Free()


def by_setting(environment: Mapping[str, str]) -> GpuAwareness | None:
    """Return the setting, or None if unset."""
    aware = config.CUDA_AWARE.get(environment=environment)
    return None if aware is None else GpuAwareness(aware, f"{VARIABLE} is {int(aware)}")


def by_kinds(kinds: str | None) -> GpuAwareness | None:
    """Return yes if a list of memory kinds contains GPU memory, else None: the list may be incomplete."""
    for kind, *restrictors in (entry.strip().lower().split(":") for entry in (kinds or "").split(",")):
        if kind == "cuda" and (not restrictors or "device" in restrictors):  # others: pinned, managed memory
            return GpuAwareness(True, f"{KINDS} is {kinds}")
    return None


def by_library(path: str | None, version: str, environment: Mapping[str, str]) -> GpuAwareness:
    """Query the library at `path`, or one it is linked to, whose version string is `version`."""
    name = " ".join(re.split("[\n,\0]", version)[0].split()) or "MPI"
    switch = next((switch for switch in _SWITCHES if switch.mark in name), None)
    value = environment.get(switch.variable) if switch else None
    if switch and not (value == "1" if value else switch.default):
        return GpuAwareness(False, f"{name}: {switch.variable} is not 1")
    try:
        answer = _query(ctypes.CDLL(path))
    except OSError as error:
        return GpuAwareness(False, f"{name}: the library does not load: {error}")
    if answer is not None:
        return GpuAwareness(answer.aware, f"{name}: {answer.why}")
    if switch and switch.proves and value:
        return GpuAwareness(True, f"{name}: {switch.variable} is 1")
    return GpuAwareness(False, f"{name}: no query function, so messages are staged through pinned memory")


def by_transport(found: GpuAwareness, pml: str | None, mapped: str, environment: Mapping[str, str]) -> GpuAwareness:
    """Return no instead of yes if the library's messages go through a UCX that does not know GPU memory."""
    if not found.aware or pml != "ucx":
        return found
    if UCX_CUDA not in mapped:
        return GpuAwareness(False, f"{found.why}, but its messages go through UCX, which has not loaded {UCX_CUDA}")
    transports = environment.get("UCX_TLS", "")
    names = transports.removeprefix("^").split(",")
    named = not {"all", "cuda", "cuda_copy"}.isdisjoint(names)
    if transports and named == transports.startswith("^"):
        return GpuAwareness(False, f"{found.why}, but UCX_TLS={transports} leaves out CUDA")
    return GpuAwareness(True, f"{found.why}; UCX has loaded {UCX_CUDA}")


def selected_pml(path: str | None) -> str | None:
    """Return the name of the component that moves the messages of an Open MPI, such as ob1; None for any other MPI."""
    try:
        component = (ctypes.c_char * PML_BYTES).in_dll(ctypes.CDLL(path), PML).raw
    except (OSError, ValueError):
        return None
    name = re.search(rb"\0pml\0.*?([a-z][a-z0-9_]+)\0", component, re.DOTALL)
    return name[1].decode() if name else None


def describe_transport(path: str | None) -> str | None:
    """Return what moves the messages of an Open MPI, for a person to read; None for any other MPI."""
    pml = selected_pml(path)
    if pml != "ucx":
        return pml
    return f"ucx, {UCX_CUDA} {'loaded' if UCX_CUDA in _mapped() else 'not loaded'}"


def _mapped() -> str:
    """Return the files that are mapped into this process."""
    try:
        return MAPS.read_text(errors="replace")
    except OSError:  # not on Linux
        return ""


def _query(library: ctypes.CDLL) -> GpuAwareness | None:
    if hasattr(library, "MPIX_GPU_query_support"):  # first: the other one asserts in some MPICH releases
        return _gpu_query(library)
    if hasattr(library, "MPIX_Query_cuda_support"):
        return _answer("MPIX_Query_cuda_support()", library.MPIX_Query_cuda_support() == 1)
    if hasattr(library, BUILT):  # Open MPI without its extensions
        return _answer(BUILT, ctypes.c_bool.in_dll(library, BUILT).value)
    return None


def _gpu_query(library: ctypes.CDLL) -> GpuAwareness:
    supported = ctypes.c_int(0)
    code = library.MPIX_GPU_query_support(ctypes.c_int(MPIX_GPU_SUPPORT_CUDA), ctypes.byref(supported))
    if code != 0:
        return GpuAwareness(False, f"MPIX_GPU_query_support() fails with error code {code}")
    return _answer("MPIX_GPU_query_support()", supported.value == 1)


def _answer(query: str, aware: bool) -> GpuAwareness:
    return GpuAwareness(aware, f"{query} reports {'yes' if aware else 'no'}")
