"""What this machine has, and which codecs run on it: found out by trying."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

from mpi_gpucomp.device import Buffer, dtype_of_name, get_device
from mpi_gpucomp.device.host import HostDevice
from mpi_gpucomp.device.library import VARIABLE, host_library
from mpi_gpucomp.errors import DeviceError, GpucompError

if TYPE_CHECKING:
    from mpi_gpucomp.codec.base import Codec
    from mpi_gpucomp.device import Device
    from mpi_gpucomp.device.cuda import CudaDevice

__all__ = ["YES", "Answer", "describe_gpu", "describe_library", "first_gpu", "runs_on", "why_not"]

YES = "yes"
TRIED_ELEMENTS = 32
SHORT = {"the package cramjam": "needs cramjam", "the package nvidia.nvcomp": "needs nvCOMP"}
"""Short words for what an error says was expected."""


class Answer(NamedTuple):
    """Whether a codec runs somewhere: `yes` or what stands against it, and what could be done."""

    word: str
    remedy: str = ""


def describe_library() -> str:
    """Name the host library, or say why there is none."""
    try:
        library = host_library()
    except DeviceError as error:
        return f"none. {error}"
    return f"{library.level}, {library.path}"


def first_gpu() -> Device | DeviceError:
    """Return the first GPU, or why there is none."""
    try:
        return get_device("cuda:0")
    except DeviceError as error:
        return error


def describe_gpu(gpu: Device | DeviceError) -> str:
    """Name the first GPU and count them, or say why there is none."""
    if isinstance(gpu, DeviceError):
        return f"none. {gpu}"
    runtime = cast("CudaDevice", gpu).cupy.cuda.runtime
    name = runtime.getDeviceProperties(0)["name"].decode()
    return f"{name} as {gpu.name}, {runtime.getDeviceCount()} in all"


def runs_on(codec: Codec, device: Device | DeviceError) -> Answer:
    """Try whether a codec encodes on a device."""
    if isinstance(device, DeviceError):
        return Answer("no GPU here")
    try:
        _try(codec, device)
    except GpucompError as error:
        return why_not(error)
    except Exception as error:  # a codec of the user's, or a library below, which must not hide the other codecs
        return Answer("fails", f"{type(error).__name__}: {error}".partition("\n")[0])
    return Answer(YES)


def _try(codec: Codec, device: Device) -> None:
    dtype = dtype_of_name(codec.dtypes[0])
    assert dtype is not None, f"no element type is called {codec.dtypes[0]}"
    stream = device.stream(inline=True) if isinstance(device, HostDevice) else device.stream()
    nbytes = TRIED_ELEMENTS * dtype.itemsize
    with device.alloc(nbytes) as plain, device.alloc(codec.max_encoded(TRIED_ELEMENTS, dtype)) as room:
        stream.fill(plain.address, 0, nbytes)
        source = Buffer(plain.address, dtype, (TRIED_ELEMENTS,), device=device.name, owner=plain)
        codec.encode(source, room, stream).result()
        stream.close()


def why_not(error: GpucompError) -> Answer:
    """Say in few words what an error says is missing."""
    if error.topic in ("host library", f"environment variable {VARIABLE}"):
        return Answer("needs the host library", error.remedy)
    if error.expected == "a stream of a GPU":
        return Answer("needs a GPU")
    return Answer(SHORT.get(error.expected, f"needs {error.expected}"), error.remedy)
