"""Codecs for the elements of a buffer, by spec string: `get_codec("zfp:rate=8")`."""

from mpi_gpucomp.codec.base import OPS, Codec, Pending
from mpi_gpucomp.codec.registry import get_codec, register, registered

__all__ = ["OPS", "Codec", "Pending", "get_codec", "register", "registered"]
