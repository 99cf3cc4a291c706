"""The codecs by name, and the spec strings that users write: `name` or `name:parameter=value,...`.

A codec of your own needs the contract of `codec.base.Codec` and one line:

    register("mine", lambda parameters: Mine(**parameters), "what it is good for")

after which `find("mine:level=3")` calls the factory with {"level": "3"}.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from mpi_gpucomp.codec.auto import Auto
from mpi_gpucomp.codec.base import Codec
from mpi_gpucomp.codec.bound import Bound
from mpi_gpucomp.codec.cast import Cast
from mpi_gpucomp.codec.general import FORMATS
from mpi_gpucomp.codec.mpc import Mpc
from mpi_gpucomp.codec.raw import Raw
from mpi_gpucomp.codec.split import Split
from mpi_gpucomp.codec.zfp import Zfp
from mpi_gpucomp.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CodecEntry", "get_codec", "register", "registered"]


class CodecEntry(NamedTuple):
    """A codec that can be asked for: how it is made, what it is good for, and an example of its spec."""

    make: Callable[[dict[str, str]], Codec]
    purpose: str
    example: str


_entries: dict[str, CodecEntry] = {}


def register(
    name: str, make: Callable[[dict[str, str]], Codec], purpose: str, *, example: str = "", replace: bool = False
) -> None:
    """Add a codec under a name, made from the parameters of its spec; `replace` allows a name that is taken."""
    if not name.isidentifier() or (name in _entries and not replace):
        raise SpecError(
            "name of a codec",
            expected="an identifier that is not taken",
            got=f"'{name}'",
            remedy="Choose another name, or pass replace=True to take the place of the one that is there.",
        )
    _entries[name] = CodecEntry(make, purpose, example or name)
    _parsed.cache_clear()


def registered() -> dict[str, CodecEntry]:
    """Return all codecs by name."""
    return dict(_entries)


def get_codec(spec: str | Codec) -> Codec:
    """Return the codec of a spec string; a codec is returned as it is."""
    if isinstance(spec, Codec):
        return spec
    if not isinstance(spec, str):
        raise _wrong(repr(spec), "")
    return _parsed(spec)


@lru_cache(maxsize=256)
def _parsed(spec: str) -> Codec:
    name, _, rest = spec.strip().partition(":")
    entry = _entries.get(name)
    if entry is None:
        raise _wrong(f"'{spec}'", name)
    parameters = {}
    for part in rest.split(",") if rest else ():
        key, _, value = part.strip().partition("=")
        if key in parameters:
            raise SpecError(
                f"codec {name}", expected="each parameter once", got=f"'{spec}'", remedy=f"Write {entry.example}."
            )
        parameters[key] = value
    return entry.make(parameters)


def _wrong(got: str, name: str) -> SpecError:
    near = get_close_matches(name, _entries, 1)
    remedy = f"Did you mean {near[0]}?" if near else "Write for example zfp:rate=8, split or none."
    if name == "delta":
        remedy = "It remembers what it has sent: pass it to Bcast_init, or to the syncs of mpi_gpucomp.torch."
    return SpecError("codec", expected=f"one of {', '.join(sorted(_entries))}", got=got, remedy=remedy)


def _register_own() -> None:
    own: tuple[tuple[type[Raw | Zfp | Mpc | Bound | Split | Cast | Auto], str, str], ...] = (
        (Raw, "bytes as they are", "none"),
        (Split, "any floats, weights and gradients above all", "split"),
        (Mpc, "smooth floats", "mpc:stride=4"),
        (Zfp, "floats, at a size that is known in advance", "zfp:rate=8"),
        (Bound, "floats, with an error that is known in advance", "bound:rel=1e-4"),
        (Cast, "floats in fewer bits", "cast:bf16"),
        (Auto, "any values: what gets each chunk there soonest", "auto"),
    )
    for codec, purpose, example in own:
        register(codec.name, codec.from_parameters, purpose, example=example)
    for general in FORMATS:
        register(general.name, general.from_parameters, "any bytes", example=general.name)


_register_own()
