"""Loads the core and declares its C interface (`src/core.cpp`). Handles are addresses of its objects."""

from __future__ import annotations

import atexit
import ctypes
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_double, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from typing import Any, ClassVar

from mpi_gpucomp.device import library
from mpi_gpucomp.device.build import library_directory
from mpi_gpucomp.device.host import usable_cores
from mpi_gpucomp.errors import DeviceError

__all__ = [
    *("BUSY", "CONTROL", "CODING", "DONE", "FAILED", "FAULT", "STALLED", "TASK"),
    *(
        "FailureInfo",
        "GiveBack",
        "InFlightInfo",
        "MpiLibrary",
        "Open",
        "OpInfo",
        "TaskSettings",
        "Segmentation",
        "Take",
        "core",
    ),
]

CONTROL, TASK, CODING, STALLED, FAULT = 1, 2, 3, 4, 5
"""Kinds of events."""
DONE, FAILED, BUSY = 1, 2, 4
"""Bits of the state of a task."""
EXIT_NS = 2_000_000_000
"""How long the exit of the interpreter waits for workers, whose memory it frees."""


def _fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


class TaskSettings(Structure):
    """Options of a task."""

    _fields_: ClassVar = _fields(
        c_int64,
        *("chunk", "per_block", "slot_bytes", "tag", "op"),
        *("raw", "in_place", "updates_own", "update_root", "external", "alone"),
    )


class OpInfo(Structure):
    """What Python has to encode, decode, copy or reduce."""

    _fields_: ClassVar = _fields(
        c_int64,
        *("task", "kind", "source", "target", "count", "op", "loop", "chunk", "lane", "raw", "framed"),
        *("frame", "frame_bytes", "capacity"),
    )


class FailureInfo(Structure):
    """Why a task has failed, and where."""

    _fields_: ClassVar = [
        *_fields(c_int64, "code", "lane", "peer", "chunk", "loop", "count", "op", "frame", "frame_bytes"),
        ("text", c_char_p),
    ]


class InFlightInfo(Structure):
    """A transfer that has not completed."""

    _fields_: ClassVar = _fields(c_int64, "kind", "peer", "rail", "posted", "waited", "nbytes")


class MpiLibrary(Structure):
    """What differs between MPI libraries."""

    _fields_: ClassVar = [
        *_fields(
            c_void_p,
            *("isend", "issend", "irecv", "test", "cancel", "test_cancelled", "get_count", "iprobe", "improbe"),
            *("imrecv", "isend_c", "issend_c", "irecv_c", "imrecv_c", "get_count_c"),
        ),
        ("byte_type", c_uint64),
        *_fields(
            c_int64, "any_source", "any_tag", "status_bytes", "source_offset", "tag_offset", "undefined", "count_error"
        ),
    ]


class Segmentation(Structure):
    """How long messages over MPI to remote peers are cut: see core/src/mpi_wire.h."""

    _fields_: ClassVar = [*_fields(c_int64, "segment_bytes", "max_segments"), ("slow", c_double)]


Take = CFUNCTYPE(c_int64, c_int64)
GiveBack = CFUNCTYPE(None, c_int64, c_int64)
Open = CFUNCTYPE(c_int64, c_int64, c_int64, c_int64, c_int64, c_int64)

_I32, _I64, _P, _NONE = c_int32, c_int64, c_void_p, None
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    # name: result, arguments
    "gc_set_threads": (_NONE, _I32),
    "gc_stop_workers": (_NONE, _I64),
    "gc_set_checksum_kernels": (_NONE, _P, _P),
    "gc_next_record_number": (_I64,),
    "gc_memory_in_use": (_I64,),
    "gc_codec_new": (_P, _I64, _I64, _I64, _P, _I64, _I64),
    "gc_codec_free": (_NONE, _P),
    "gc_codec_accept": (_NONE, _P, _I64),
    "gc_codec_add": (_I32, _P, _I64, _I64, _I64, _I64, POINTER(_I64), _I64),
    "gc_codec_add_chooser": (
        *(_NONE, _P, _I64, _I64, _I64, c_double, c_double, c_double, _I64, _I64),
        *(POINTER(_I64), POINTER(_I64), POINTER(c_double)),
    ),
    "gc_loopback_new": (_P, _I32, _I64, _I32, c_uint64),
    "gc_loopback_wire": (_P, _P, _I32),
    "gc_loopback_set_rate": (_NONE, _P, _I32, _I32, c_double),
    "gc_loopback_lose": (_NONE, _P, _I32),
    "gc_loopback_left": (_I64, _P),
    "gc_mpi_wire": (
        *(_P, POINTER(MpiLibrary), _I32, _I32, _I64, c_uint64, c_uint64, c_uint64, POINTER(Segmentation)),
        *(POINTER(_I32), _I32),
    ),
    "gc_shm_create": (_P, c_char_p, _I32, _I32, _I64, _I32),
    "gc_shm_attach": (_I32, _P, _I64),
    "gc_wire_fault": (_I32, _P, c_char_p, _I64),
    "gc_mux_wire": (_P, _P, _P, POINTER(_I32), _I32),
    "gc_mpi_counts": (_NONE, _P, POINTER(_I64), POINTER(_I64)),
    "gc_faulty_wire": (_P, _P),
    "gc_faulty_damage": (_NONE, _P, _I64, _I32, c_uint64),
    "gc_faulty_add_target": (_NONE, _P, _I32, _I64),
    "gc_faulty_damaged_peer": (_I32, _P),
    "gc_faulty_signal_after": (_NONE, _P, _I64, _I32),
    "gc_wire_free": (_NONE, _P),
    "gc_cuda_new": (
        *(_P, c_char_p, c_char_p, _P, _P, _I64, Take, GiveBack, Take, GiveBack),
        *(c_char_p, _I64),
    ),
    "gc_cuda_name_kernel": (_NONE, _P, _P, c_char_p),
    "gc_cuda_trim": (_NONE, _P),
    "gc_task_set_cuda": (_NONE, _P, _P, _P, _P, _P),
    "gc_context_new": (_P, _P),
    "gc_context_drive_mpi": (_NONE, _P, POINTER(MpiLibrary), c_uint64, c_uint64, c_int32),
    "gc_context_free": (_NONE, _P),
    "gc_context_close": (_NONE, _P),
    "gc_run": (_I32, _P, _I64, _I32, _I32),
    "gc_interrupt": (_NONE, _P),
    "gc_next_event": (_I32, _P, POINTER(_I32), POINTER(_I32), POINTER(_P), POINTER(_P)),
    "gc_next_control": (_I64, _P, POINTER(_I32), _P, _I64),
    "gc_set_polling": (_NONE, _P, _I32, _I32),
    "gc_sleeps": (_I64, _P),
    "gc_fault": (_I32, _P, c_char_p, _I64),
    "gc_bytes": (_NONE, _P, POINTER(_I64), POINTER(_I64)),
    "gc_send": (_P, _P, _I32, _I64, _I64, _I64),
    "gc_receive": (_P, _P, _I32, _I64, _I64, _I64),
    "gc_test": (_I32, _P, _P, POINTER(_I64), POINTER(_I32), c_char_p, _I64),
    "gc_cancel": (_I32, _P, _P),
    "gc_release": (_NONE, _P, _P),
    "gc_begun": (_I32, _P, _P),
    "gc_relay": (_P, _P, _P, _I32, _I64),
    "gc_discard": (_P, _P, _I32, _I64),
    "gc_probe_any": (_I64, _P),
    "gc_send_control": (_I32, _P, _I32, c_char_p, _I64),
    "gc_revoke": (_NONE, _P, c_char_p),
    "gc_close": (_NONE, _P, _I32),
    "gc_closed": (_I32, _P),
    "gc_program_new": (_P, POINTER(_I64), _I64),
    "gc_program_free": (_NONE, _P),
    "gc_task_new": (
        *(_P, _P, _P, _P, POINTER(TaskSettings)),
        *(_I64, _I64, POINTER(_I64), POINTER(_I64), _I64, _I64, POINTER(_I64), POINTER(_I64)),
    ),
    "gc_task_free": (_NONE, _P),
    "gc_task_set_python": (_NONE, _P, Take, GiveBack, Take, GiveBack, Open),
    "gc_task_set_trace": (_NONE, _P, _P, _I64, _P, _I64, _I64, _I64, _I64),
    "gc_task_set_peer_tag": (_NONE, _P, _I32, _I64),
    "gc_task_prepare": (_NONE, _P, _I64),
    "gc_task_post_early": (_NONE, _P),
    "gc_task_run": (_NONE, _P),
    "gc_task_continue": (_NONE, _P),
    "gc_task_suspend": (_NONE, _P),
    "gc_task_halt": (_NONE, _P),
    "gc_task_abandon": (_NONE, _P),
    "gc_task_quiesce": (_NONE, _P),
    "gc_task_drain": (_I32, _P, _I64, POINTER(_I32), POINTER(_I64), POINTER(_I64)),
    "gc_task_state": (_I32, _P),
    "gc_task_failure": (_NONE, _P, POINTER(FailureInfo)),
    "gc_task_sent": (_I64, _P, POINTER(_I64), _I64),
    "gc_task_in_flight": (_I64, _P, POINTER(InFlightInfo), _I64),
    "gc_op_info": (_NONE, _P, POINTER(OpInfo)),
    "gc_op_done": (_NONE, _P, _I64, _I64),
}


@cache
def core() -> Any:
    """Return the core, loaded on the first call; its functions release the GIL."""
    path = library_directory() / "libgpucomp-core.so"
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise DeviceError(
            "core",
            expected=f"a loadable library at {path}",
            got=str(error),
            remedy="Build it with a C++ compiler: 'python mpi_gpucomp/device/build.py'.",
        ) from error
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    loaded.gc_set_threads(usable_cores())
    loaded.gc_set_checksum_kernels(library.kernel_address("checksum_tiles"), library.kernel_address("checksum_join"))
    atexit.register(loaded.gc_stop_workers, EXIT_NS)
    return loaded
