"""The CUDA device: compilation, which needs no GPU, and ordering against producers, which does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from device_memory import view

from mpi_gpucomp.device import Device, as_buffer, library, order_after
from mpi_gpucomp.errors import BufferSpecError, DeviceError


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Compile into an empty cache."""
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="NVRTC comes with CuPy", exc_type=ImportError)
    if getattr(nvrtc, "simulated", False):
        pytest.skip("the compiler is simulated")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_the_family_of_a_kernel_is_the_longest_prefix() -> None:
    families = ["pack", "pack_bucket", "reduce"]
    assert library.family_of("reduce_f32", families) == "reduce"
    assert library.family_of("pack_gather_4", families) == "pack"
    assert library.family_of("pack_bucket", families) == "pack_bucket"
    assert library.family_of("checksum_tiles") == "checksum"


def test_a_kernel_without_a_family_is_an_error() -> None:
    with pytest.raises(DeviceError) as caught:
        library.family_of("packer", ["pack", "reduce"])
    assert str(caught.value).startswith(
        "kernel packer: expected a name that starts with pack or reduce, got 'packer'. "
        "Check the name against the files in "
    )


def test_a_compiled_family_is_cached(compiler: Path) -> None:
    path = library.cubin_path("checksum", 80)
    assert path.parent == compiler
    code, made = path.read_bytes(), path.stat().st_mtime_ns
    assert code.startswith(b"\x7fELF")
    assert b"checksum_join" in code
    assert library.cubin_path("checksum", 80) == path
    assert path.stat().st_mtime_ns == made
    assert library.cubin_path("checksum", 90) != path
    assert sorted(compiler.iterdir()) == sorted([path, library.cubin_path("checksum", 90)])


def test_a_gpu_newer_than_the_compiler_gets_ptx(compiler: Path) -> None:
    code = library.cubin_path("checksum", 999).read_bytes()
    assert b".visible .entry checksum_join" in code
    # Denormal numbers must survive, as on the host.
    assert b".ftz" not in library.cubin_path("reduce", 999).read_bytes()


def test_a_compilation_error_has_the_log(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.cu").write_text("this is not a kernel;")
    monkeypatch.setattr(library, "kernels_directory", lambda: tmp_path)
    with pytest.raises(DeviceError) as caught:
        library.cubin_path("broken", 80)
    text = str(caught.value)
    assert text.startswith(
        "kernels broken.cu for sm_80: expected a successful NVRTC compilation, got NVRTC_ERROR_COMPILATION"
    )
    assert 'identifier "this" is undefined' in text or "broken.cu(1): error" in text
    assert text.endswith(" Install the NVRTC version that matches your CuPy ('pip install mpi_gpucomp[cuda13]').")


def test_cupy_arrays_are_not_copied(gpu: Device) -> None:
    cupy = pytest.importorskip("cupy")
    array = cupy.arange(12, dtype=cupy.float32).reshape(3, 4)
    buffer = as_buffer(array, writable=True)
    assert (buffer.address, buffer.count, buffer.dtype.name, buffer.device) == (array.data.ptr, 12, "float32", "cuda:0")
    assert as_buffer(array[:, ::2]).strides == (16, 8)
    assert as_buffer(array.T).shape == (3, 4)


class OnlyInterface:
    """An array with `__cuda_array_interface__` and nothing else."""

    def __init__(self, array: object, stream: int | None) -> None:
        self.array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "version": 3, "stream": stream}


class OnlyDlpack:
    """An array with DLPack and nothing else."""

    def __init__(self, array: object) -> None:
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


@pytest.mark.parametrize("kind", ["cupy", "torch", "interface", "dlpack"])
def test_order_after_waits_for_the_producer(gpu: Device, kind: str) -> None:
    cupy = pytest.importorskip("cupy")
    size = 1 << 24
    with cupy.cuda.Stream(non_blocking=True) as producer:
        array = cupy.zeros(size, cupy.uint8)
        for step in range(50):
            array.fill(step)
        if kind == "torch":
            torch = pytest.importorskip("torch")
            if not torch.cuda.is_available():
                pytest.skip("this torch has no CUDA")
            with torch.cuda.stream(torch.cuda.ExternalStream(producer.ptr)):
                buffer = as_buffer(torch.as_tensor(array, device="cuda"))
        else:
            wrap = {"cupy": lambda x: x, "interface": lambda x: OnlyInterface(x, producer.ptr), "dlpack": OnlyDlpack}
            buffer = as_buffer(wrap[kind](array))
        stream = gpu.stream()
        order_after(buffer, stream)
    with gpu.pinned(size) as result:
        stream.copy(result.address, buffer.address, size)
        stream.synchronize()
        assert np.array_equal(view(result), np.full(size, 49, np.uint8))


def test_streams_of_host_and_gpu_wait_for_each_other(gpu: Device, host: Device) -> None:
    host_stream, gpu_stream, size = host.stream(), gpu.stream(), 1 << 20
    with gpu.pinned(size) as staging, gpu.alloc(size) as memory, gpu.pinned(size) as result:
        host_stream.fill(staging.address, 42, size)
        gpu_stream.wait(host_stream.record())
        gpu_stream.copy(memory.address, staging.address, size)
        gpu_stream.copy(result.address, memory.address, size)
        host_stream.wait(gpu_stream.record())
        seen: list[np.ndarray] = []
        host_stream.run(lambda: seen.append(view(result).copy()))
        host_stream.synchronize()
        assert np.array_equal(seen[0], np.full(size, 42, np.uint8))


def test_a_gpu_buffer_with_a_host_stream_is_an_error(gpu: Device, host: Device) -> None:
    cupy = pytest.importorskip("cupy")
    with pytest.raises(BufferSpecError) as caught:
        order_after(as_buffer(cupy.zeros(3)), host.stream())
    assert str(caught.value) == (
        "buffer: expected a stream of cuda:0, the buffer's device, got a stream of host. "
        "Use a stream of get_device('cuda:0')."
    )
