"""Kernels use IEEE arithmetic, whatever floating-point mode the program has set."""

from __future__ import annotations

import numpy as np
import pytest
from coding import decode, encode

from mpi_gpucomp.codec import get_codec

torch = pytest.importorskip("torch")


@pytest.fixture
def flush_denormals():
    """Make the processor flush denormal numbers to zero, as some training programs do."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("spec", ["zfp:rate=16", "bound:abs=1e-8", "bound:rel=1e-3", "cast:bf16"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_denormal_numbers_are_not_flushed(host, spec, dtype, request):
    codec = get_codec(spec)
    if dtype not in codec.dtypes:
        pytest.skip(f"{spec} does not support {dtype}")
    values = (np.arange(1, 1001) * np.finfo(dtype).smallest_subnormal).astype(dtype)
    values[::100] = np.finfo(dtype).tiny * 30
    stream = host.stream(inline=True)
    expected = encode(codec, values, stream)
    decoded = np.zeros_like(values)
    decode(codec, expected, decoded, stream)
    request.getfixturevalue("flush_denormals")
    back = np.zeros_like(values)
    assert encode(codec, values, stream) == expected
    decode(codec, expected, back, stream)
    assert back.tobytes() == decoded.tobytes()
