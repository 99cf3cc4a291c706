"""Schedules that encode on some links only: correct, within the error bound, and without needless coding."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from running import Ranks
from test_synth import run
from test_topology import two_nodes

from mpi_gpucomp.cli.algorithms import draw
from mpi_gpucomp.codec.zfp import Zfp
from mpi_gpucomp.engine.coder import Coder
from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.builder import ScheduleBuilder, o
from mpi_gpucomp.schedule.cost import CodecCost
from mpi_gpucomp.schedule.ir import Algorithm
from mpi_gpucomp.schedule.msccl_xml import read, write
from mpi_gpucomp.schedule.simulate import simulate
from mpi_gpucomp.schedule.synth import synthesise
from mpi_gpucomp.schedule.synth.problem import ENCODED, RAW
from mpi_gpucomp.schedule.topology import ProcessorModel
from mpi_gpucomp.schedule.verify import checked

MIB = 1 << 20
CODEC = CodecCost(0.7e-9, 0.9e-9, 4.0)
TOPOLOGY = two_nodes(
    pairs={},
    per_chunk=0.0,
    codecs={"none": CodecCost(0.1e-9, 0.1e-9)},
    processors=(ProcessorModel(frozenset(range(4)), 2),),
)


def chain(*raw: int) -> Algorithm:
    """Return a chain of four ranks that sends raw on some of its three links."""
    builder = ScheduleBuilder("mixed", "broadcast", 4, in_place=True)
    for rank in range(3):
        channel = int(rank in raw)
        builder.copy(rank, o(0), rank + 1, o(0), channel=channel)
    builder.raw_channels.add(1)
    return checked(builder.algorithm())


@pytest.fixture
def coded(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the chunks that the engine encodes, sends raw, decodes, and copies from raw frames."""
    done: Counter[str] = Counter()
    encode, decode = Coder.encode, Coder.decode

    def encodes(self: Coder, *args: Any, raw: bool = False) -> Any:
        done["raw" if raw else "encode"] += 1
        return encode(self, *args, raw=raw)

    def decodes(self: Coder, header: Any, *args: Any) -> Any:
        done["copy" if header.raw else "decode"] += 1
        return decode(self, header, *args)

    monkeypatch.setattr(Coder, "encode", encodes)
    monkeypatch.setattr(Coder, "decode", decodes)
    return done


class ZfpInPython(Zfp):
    """A codec that the core does not know, so that every chunk is encoded and decoded by a coder."""


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ((), {"encode": 1, "decode": 3}),
        ((0, 1, 2), {"raw": 1, "copy": 3}),
        ((0,), {"raw": 1, "encode": 1, "copy": 1, "decode": 2}),
        ((1, 2), {"encode": 1, "raw": 1, "decode": 1, "copy": 2}),
        ((1,), {"encode": 2, "raw": 1, "decode": 2, "copy": 1}),
    ],
)
def test_engine_follows_the_raw_lanes(raw: tuple[int, ...], expected: dict[str, int], coded: Counter[str]):
    ranks = Ranks(chain(*raw), 40, ZfpInPython(16), "float32", chunk=40)
    ranks.drive()
    assert dict(coded) == expected


@pytest.mark.parametrize("codec", ["split", "none", "mpc"])
@pytest.mark.parametrize("raw", [(), (0,), (1,), (0, 2), (0, 1, 2)])
def test_results(raw: tuple[int, ...], codec: str):
    run(chain(*raw), codec)


def test_xml_keeps_raw_lanes():
    again = read(write(chain(0, 2)))
    assert [[lane.raw for lane in program.lanes] for program in again.programs] == [
        [lane.raw for lane in program.lanes] for program in chain(0, 2).programs
    ]
    assert 'plain="1"' in write(chain(0))
    assert "plain" not in write(chain())


def test_drawing_shows_raw_lanes():
    lines = draw(chain(0)).splitlines()
    assert "  lane 0: to 1, channel 1, raw" in lines
    assert "  lane 0: from 1 to 3, channel 0" in lines


def test_simulation_of_raw_lanes():
    found = simulate(chain(1, 2), two_nodes(pairs={}), MIB, MIB, CODEC)
    assert {pair: nbytes for pair, (nbytes, _) in found.links.items()} == {
        (0, 1): MIB / 4,
        (1, 2): MIB,
        (2, 3): MIB,
    }
    kinds = Counter(record.kind for record in found.records)
    assert kinds == {"encode": 2, "send": 3, "decode": 3}


@pytest.mark.parametrize("collective", ["broadcast", "allgather", "gather", "scatter", "alltoall"])
def test_synthesis(collective: str):
    mixed = synthesise(TOPOLOGY, collective, 64 * MIB, MIB, codec=CODEC, mixed=True, seconds=3)
    everywhere = synthesise(TOPOLOGY, collective, 64 * MIB, MIB, codec=CODEC, seconds=3)
    assert mixed.routing.seconds <= everywhere.routing.seconds * 1.001
    crossing = {hop.form for hops in mixed.routing.hops for hop in hops if hop.sender // 2 != hop.receiver // 2}
    assert crossing == {ENCODED}, "the slow links carry encoded chunks"
    for hops in mixed.routing.hops:
        came = {hop.receiver: hop for hop in hops}
        for hop in hops:
            before = came.get(hop.sender)
            while hop.form == ENCODED and before is not None and before.form == RAW:
                before = came.get(before.sender)
                assert before is None or before.form == RAW, "no chunk is encoded twice"
    run(mixed.algorithm, "split")


def test_fast_links_are_raw():
    times = {}
    for mixed in (False, True):
        made = synthesise(TOPOLOGY, "allgather", 64 * MIB, MIB, codec=CODEC, mixed=mixed, seconds=3)
        times[mixed] = simulate(made.algorithm, TOPOLOGY, 64 * MIB, MIB, CODEC).seconds
        inside = {hop.form for hops in made.routing.hops for hop in hops if hop.sender // 2 == hop.receiver // 2}
        assert inside == {RAW} if mixed else {ENCODED}
    assert times[True] < times[False] / 1.4


def test_error_bound_holds():
    made = synthesise(TOPOLOGY, "allgather", 64 * MIB, MIB, codec=CODEC, mixed=True, seconds=2).algorithm
    ranks = Ranks(made, 4000, "bound:abs=1e-2", "float32")
    for x in ranks.inputs:
        x += np.random.default_rng(0).normal(0, 1, x.size).astype(np.float32)
    whole = np.concatenate([x.copy() for x in ranks.inputs])
    ranks.drive()
    for rank in range(4):
        assert abs(ranks.outputs[rank] - whole).max() <= 1e-2
        own = slice(rank // 2 * 8000, rank // 2 * 8000 + 8000)
        assert (ranks.outputs[rank][own] == whole[own]).all(), "chunks from the same node are exact"


def test_reductions_cannot_be_mixed():
    with pytest.raises(SpecError) as caught:
        synthesise(TOPOLOGY, "allreduce", MIB, MIB, codec=CODEC, mixed=True)
    assert str(caught.value) == (
        "synthesis: expected a collective without reduction, to encode on some links only, got allreduce. "
        "Encode on all links or none: partial sums are encoded again at every step."
    )
