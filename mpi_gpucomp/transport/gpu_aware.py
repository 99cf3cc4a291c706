"""Finds out whether the MPI library in use sends from GPU memory and receives into it.

A wrong yes ends the process at the first message; a wrong no costs a copy through pinned memory. So a yes needs
somebody's word: the user's (`MPI_GPUCOMP_CUDA_AWARE`), that of MPI 4.1's list of memory kinds, or the library's own,
and this last only while the environment does not turn GPU memory off in that library. Ranks may get different answers:
each stages its own side of a message, and the other does not see it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp import config

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["VARIABLE", "GpuAwareness", "by_kinds", "by_library", "by_setting", "cuda_aware"]

VARIABLE = config.CUDA_AWARE.variable
KINDS = "mpi_memory_alloc_kinds"
MPIX_GPU_SUPPORT_CUDA = 0
BUILT = "opal_built_with_cuda_support"

_log = logging.getLogger("mpi_gpucomp")


class GpuAwareness(NamedTuple):
    """Whether MPI takes addresses of GPU memory, and who says so; if not, messages go through pinned memory."""

    aware: bool
    why: str


class _Switch(NamedTuple):
    """The environment variable by which a family of MPI libraries turns GPU memory on and off."""

    mark: str
    """What the library calls itself."""
    variable: str
    default: bool
    proves: bool
    """Whether 1 is a statement that the library can do it, where it has no function that says so."""


_SWITCHES = (  # the first that fits
    _Switch("CRAY MPICH", "MPICH_GPU_SUPPORT_ENABLED", default=False, proves=True),
    _Switch("MVAPICH2", "MV2_USE_CUDA", default=False, proves=True),
    _Switch("MVAPICH", "MVP_ENABLE_GPU", default=True, proves=True),
    _Switch("MPICH", "MPIR_CVAR_ENABLE_GPU", default=True, proves=False),
)


def cuda_aware() -> GpuAwareness:
    """Say whether MPI takes GPU memory; to be asked once MPI is initialised, and cheap from the second time on."""
    if (said := by_setting(os.environ)) is not None:
        return said
    from mpi4py import MPI  # here, because importing it starts MPI, which the rules below do not need

    if not MPI.Is_initialized() or MPI.Is_finalized():
        return GpuAwareness(False, "MPI is not initialised, or finalised already")
    return _asked()


@cache
def _asked() -> GpuAwareness:
    from mpi4py import MPI

    verdict = by_kinds(_kinds())
    if verdict is None:
        # The extension module and not a library of some name: what is looked up in it is found in the MPI library that
        # it is linked to, never in another one in this process, which may abort when asked before it is initialised.
        verdict = by_library(getattr(MPI, "__file__", None), MPI.Get_library_version(), os.environ)
    _log.debug("MPI takes GPU memory: %s. %s", "yes" if verdict.aware else "no", verdict.why)
    return verdict


def _kinds() -> str | None:
    from mpi4py import MPI

    try:
        info = MPI.COMM_WORLD.Get_info()
    except MPI.Exception:  # an old library, which has other ways to say it
        return None
    try:
        return info.get(KINDS)
    finally:
        info.Free()


def by_setting(environment: Mapping[str, str]) -> GpuAwareness | None:
    """Return what the user says, or None."""
    aware = config.CUDA_AWARE.get(environment=environment)
    return None if aware is None else GpuAwareness(aware, f"{VARIABLE} is {int(aware)}")


def by_kinds(kinds: str | None) -> GpuAwareness | None:
    """Return yes if a list of memory kinds has GPU memory in it, else None: a library may know more than it lists."""
    for kind, *restrictors in (entry.strip().lower().split(":") for entry in (kinds or "").split(",")):
        if kind == "cuda" and (not restrictors or "device" in restrictors):  # the others are pinned and managed memory
            return GpuAwareness(True, f"{KINDS} is {kinds}")
    return None


def by_library(path: str | None, version: str, environment: Mapping[str, str]) -> GpuAwareness:
    """Ask the library at `path`, or one that it is linked to, which describes itself as `version`."""
    name = " ".join(re.split("[\n,\0]", version)[0].split()) or "MPI"
    switch = next((switch for switch in _SWITCHES if switch.mark in name), None)
    said = environment.get(switch.variable) if switch else None
    if switch and not (said == "1" if said else switch.default):
        return GpuAwareness(False, f"{name}: {switch.variable} is not 1")
    try:
        answer = _ask(ctypes.CDLL(path))
    except OSError as error:
        return GpuAwareness(False, f"{name}: its library does not load: {error}")
    if answer is not None:
        return GpuAwareness(answer.aware, f"{name}: {answer.why}")
    if switch and switch.proves and said:
        return GpuAwareness(True, f"{name}: {switch.variable} is 1")
    return GpuAwareness(False, f"{name}: it does not say, so messages are staged through pinned memory")


def _ask(library: ctypes.CDLL) -> GpuAwareness | None:
    if hasattr(library, "MPIX_GPU_query_support"):  # first: the other one fails an assertion in some releases of MPICH
        return _gpu_query(library)
    if hasattr(library, "MPIX_Query_cuda_support"):
        return _said("MPIX_Query_cuda_support()", library.MPIX_Query_cuda_support() == 1)
    if hasattr(library, BUILT):  # Open MPI without its extensions
        return _said(BUILT, ctypes.c_bool.in_dll(library, BUILT).value)
    return None


def _gpu_query(library: ctypes.CDLL) -> GpuAwareness:
    supported = ctypes.c_int(0)
    code = library.MPIX_GPU_query_support(ctypes.c_int(MPIX_GPU_SUPPORT_CUDA), ctypes.byref(supported))
    if code != 0:
        return GpuAwareness(False, f"MPIX_GPU_query_support() fails with error code {code}")
    return _said("MPIX_GPU_query_support()", supported.value == 1)


def _said(who: str, aware: bool) -> GpuAwareness:
    return GpuAwareness(aware, f"{who} says {'yes' if aware else 'no'}")
