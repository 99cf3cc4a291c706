"""Codecs by name, and the spec strings that users write: `name` or `name:parameter=value,...`.

To add a codec, implement `codec.base.Codec` and register it:

    register("mine", lambda parameters: Mine(**parameters), "what it is good for")

`get_codec("mine:level=3")` then calls the factory with {"level": "3"}.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.codec.auto import Auto
from mpi_gpucomp.codec.base import Codec
from mpi_gpucomp.codec.bound import Bound
from mpi_gpucomp.codec.cast import Cast
from mpi_gpucomp.codec.general import GENERAL_CODECS
from mpi_gpucomp.codec.mpc import Mpc
from mpi_gpucomp.codec.raw import Raw
from mpi_gpucomp.codec.split import Split
from mpi_gpucomp.codec.zfp import Zfp
from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CodecEntry", "get_codec", "register", "registered"]


class CodecEntry(NamedTuple):
    """A registered codec: its factory, what it is good for, and an example of its spec."""

    create: Callable[[dict[str, str]], Codec]
    purpose: str
    example: str


_entries: dict[str, CodecEntry] = {}


def register(
    name: str, create: Callable[[dict[str, str]], Codec], purpose: str, *, example: str = "", replace: bool = False
) -> None:
    """Register a factory, called with the parameters of the spec; `replace` allows a name that is in use."""
    if not name.isidentifier():
        raise SpecError(
            "name of a codec", expected="an identifier", got=f"'{name}'", remedy="Choose a name like zfp or my_codec."
        )
    if name in _entries and not replace:
        raise SpecError(
            "name of a codec",
            expected="a name that is not in use",
            got=f"'{name}'",
            remedy="Choose another name, or pass replace=True to replace the registered codec.",
        )
    _entries[name] = CodecEntry(create, purpose, example or name)
    _parsed.cache_clear()


def registered() -> dict[str, CodecEntry]:
    """Return all registered codecs by name."""
    return dict(_entries)


def get_codec(spec: str | Codec) -> Codec:
    """Return the codec of a spec string; a Codec is returned unchanged."""
    if isinstance(spec, Codec):
        return spec
    if not isinstance(spec, str):
        raise _unknown_codec(repr(spec), "")
    return _parsed(spec)


@lru_cache(maxsize=256)
def _parsed(spec: str) -> Codec:
    name, _, rest = spec.strip().partition(":")
    entry = _entries.get(name)
    if entry is None:
        raise _unknown_codec(f"'{spec}'", name)
    parameters = {}
    for part in rest.split(",") if rest else ():
        key, _, value = part.strip().partition("=")
        if key in parameters:
            raise SpecError(
                f"codec {name}", expected="each parameter once", got=f"'{spec}'", remedy=f"Write {entry.example}."
            )
        parameters[key] = value
    return entry.create(parameters)


def _unknown_codec(got: str, name: str) -> SpecError:
    near = get_close_matches(name, _entries, 1)
    remedy = f"Did you mean {near[0]}?" if near else "Write for example zfp:rate=8, split or none."
    if name == "delta":
        remedy = "delta keeps state between calls: pass it to Bcast_init, or to the syncs of mpi_gpucomp.torch."
    return SpecError("codec", expected=f"one of {', '.join(sorted(_entries))}", got=got, remedy=remedy)


def _register_builtin() -> None:
    builtin: tuple[tuple[type[Raw | Zfp | Mpc | Bound | Split | Cast | Auto], str, str], ...] = (
        (Raw, "no encoding", "none"),
        (Split, "floats, especially weights and gradients", "split"),
        (Mpc, "smooth floats", "mpc:stride=4"),
        (Zfp, "floats, with a fixed compressed size", "zfp:rate=8"),
        (Bound, "floats, with a bounded error", "bound:rel=1e-4"),
        (Cast, "floats, rounded to half the size", "cast:bf16"),
        (Auto, "any values: the fastest lossless codec per chunk", "auto"),
    )
    for codec, purpose, example in builtin:
        register(codec.name, codec.from_parameters, purpose, example=example)
    for general in GENERAL_CODECS:
        register(general.name, general.from_parameters, "any bytes", example=general.name)


_register_builtin()
