"""Schedules as msccl-tools writes them: several channels, scratch, nop steps, dependencies between lanes."""

from __future__ import annotations

import interpreter
import pytest
from test_synth import run

from mpi_gpucomp.errors import ScheduleError
from mpi_gpucomp.schedule.ir import BUFFERED_CHUNKS
from mpi_gpucomp.schedule.msccl_xml import read, read_header
from mpi_gpucomp.schedule.simulate import simulate
from mpi_gpucomp.schedule.topology import preset
from mpi_gpucomp.schedule.verify import check, checked

Step = tuple[str, str, int, str, int, int, int, int]


def step(number: int, what: Step, needed: bool) -> str:
    kind, source, source_at, target, target_at, count, block, at = what
    return (
        f'<step s="{number}" type="{kind}" srcbuf="{source}" srcoff="{source_at}" dstbuf="{target}" '
        f'dstoff="{target_at}" cnt="{count}" depid="{block}" deps="{at}" hasdep="{int(needed)}"/>'
    )


def text(
    coll: str, ranks: int, chunks: int, channels: int, programs: list[tuple[str, list[tuple[str, list[Step]]]]]
) -> str:
    """Return a file in the style of msccl-tools, with attributes that we ignore, comments and blank lines."""
    lines = [
        f'<algo name="{coll}_allpairs" nchannels="{channels}" nchunksperloop="{chunks}" proto="LL" ngpus="{ranks}" '
        f'coll="{coll}" inplace="1" outofplace="0" minBytes="0" maxBytes="0" redop="sum" nthreadblocks="12">',
        "  <!-- comment -->",
    ]
    for rank, (lengths, blocks) in enumerate(programs):
        lines.append(f'  <gpu id="{rank}" {lengths}>')
        for number, (peers, steps) in enumerate(blocks):
            waited = {(what[6], what[7]) for _, others in blocks for what in others}
            lines.append(f'    <tb id="{number}" {peers}>')
            lines += [f"      {step(at, what, (number, at) in waited)}" for at, what in enumerate(steps)]
            lines += ["    </tb>", ""]
        lines.append("  </gpu>")
    return "\n".join([*lines, "</algo>", ""])


def allpairs(ranks: int, channels: int) -> str:
    """Return an all-pairs allreduce: each rank reduces one block, received from all others, and sends the sum back."""
    programs = []
    for rank in range(ranks):
        others = [peer for peer in range(ranks) if peer != rank]
        blocks: list[tuple[str, list[Step]]] = []
        for channel in range(channels):
            first = channel * ranks
            adding = len(others) * channels + channel
            for place, peer in enumerate(others):
                own = channel * len(others) + place
                mine = [
                    ("s", "i", first + peer, "s", own, 1, -1, -1),
                    ("r", "i", first + rank, "s", own, 1, -1, -1),
                    ("s", "i", first + rank, "i", first + rank, 1, adding, 2 * len(others) - 1),
                    ("r", "i", first + peer, "i", first + peer, 1, -1, -1),
                ]
                blocks.append((f'send="{peer}" recv="{peer}" chan="{channel}"', mine))
        for channel in range(channels):
            first = channel * ranks
            sums: list[Step] = []
            for place in range(len(others)):
                own = channel * len(others) + place
                sums.append(("nop", "i", -1, "o", -1, 0, own, 1))
                sums.append(("re", "s", own, "i", first + rank, 1, -1, -1))
            blocks.append((f'send="-1" recv="-1" chan="{channel}"', sums))
        scratch = channels * len(others)
        programs.append((f'i_chunks="{ranks * channels}" o_chunks="0" s_chunks="{scratch}"', blocks))
    return text("allreduce", ranks, ranks * channels, channels, programs)


def ring_allgather(ranks: int) -> str:
    """Return an allgather around a ring, with the last block copied from scratch."""
    programs = []
    for rank in range(ranks):
        blocks: list[tuple[str, list[Step]]] = []
        after, before = (rank + 1) % ranks, (rank - 1) % ranks
        ring = [("s", "o", rank, "o", rank, 1, 1, 0)]
        ring += [("rcs", "o", (rank - n) % ranks, "o", (rank - n) % ranks, 1, -1, -1) for n in range(1, ranks - 1)]
        ring += [("r", "o", after, "s", 0, 1, -1, -1)]
        blocks.append((f'send="{after}" recv="{before}" chan="{rank % 1}"', ring))
        copies = [("cpy", "i", 0, "o", rank, 1, -1, -1), ("cpy", "s", 0, "o", after, 1, 0, ranks - 1)]
        blocks.append(('send="-1" recv="-1" chan="0"', copies))
        programs.append((f'i_chunks="1" o_chunks="{ranks}" s_chunks="1"', blocks))
    return text("allgather", ranks, ranks, 1, programs).replace(
        'inplace="1" outofplace="0"', 'inplace="0" outofplace="1"'
    )


@pytest.mark.parametrize(("ranks", "channels"), [(2, 1), (4, 2), (8, 4)])
def test_all_pairs_with_channels_scratch_nops_and_dependencies(ranks: int, channels: int):
    algorithm = read(allpairs(ranks, channels))
    assert algorithm.chunks == ranks * channels
    assert max(lane.channel for lane in algorithm.programs[0].lanes) == channels - 1
    check(algorithm, 1)
    assert read_header(allpairs(ranks, channels)).min_bytes == 0
    if ranks == 8:
        assert simulate(algorithm, preset("dgx-a100", 8), 1 << 20, 1 << 14).seconds > 0


def allpairs_blocks(ranks: int, block: int) -> str:
    """Return an all-pairs allreduce that first sends whole blocks to all ranks: each is `block` chunks of a message."""
    programs = []
    for rank in range(ranks):
        others = [peer for peer in range(ranks) if peer != rank]
        own, sums = rank * block, len(others)
        blocks: list[tuple[str, list[Step]]] = []
        for at, peer in enumerate(others):
            there = (rank - (rank > peer)) * block
            exchanged = [
                ("s", "i", peer * block, "s", there, block, -1, -1),
                ("r", "i", own, "s", at * block, block, -1, -1),
                ("s", "i", own, "i", own, block, sums, len(others) - 1),
                ("r", "i", peer * block, "i", peer * block, block, -1, -1),
            ]
            blocks.append((f'send="{peer}" recv="{peer}" chan="0"', exchanged))
        added = [("re", "s", at * block, "i", own, block, at, 1) for at in range(len(others))]
        blocks.append(('send="-1" recv="-1" chan="0"', added))
        lengths = f'i_chunks="{ranks * block}" o_chunks="0" s_chunks="{len(others) * block}"'
        programs.append((lengths, blocks))
    return text("allreduce", ranks, ranks * block, 1, programs)


@pytest.mark.parametrize(("ranks", "block"), [(2, 8), (4, 4), (8, 8)])
def test_all_pairs_that_send_before_they_receive(ranks: int, block: int):
    algorithm = checked(read(allpairs_blocks(ranks, block)))
    interpreter.run(algorithm, room=BUFFERED_CHUNKS)
    with pytest.raises(ScheduleError, match=f"a connection buffers {block - 1} chunk"):
        check(algorithm, block - 1)


def test_all_pairs_with_blocks_longer_than_the_buffer():
    with pytest.raises(ScheduleError) as caught:
        checked(read(allpairs_blocks(2, BUFFERED_CHUNKS + 1)))
    assert str(caught.value) == (
        "rank 0: algorithm allreduce_allpairs: lane 0, step 0 (s to 1): expected a step that can run, got a deadlock: "
        "it waits for rank 1, lane 0, step 0 (s to 0), which waits for rank 0, lane 0, step 0 (s to 1). "
        "Receive earlier, or remove a dependency: a connection buffers 8 chunks."
    )


@pytest.mark.parametrize("codec", ["none", "split"])
def test_ring_runs_on_the_engine(codec: str):
    run(read(ring_allgather(5)), codec)
    run(read(ring_allgather(2)), codec)


def test_in_place_schedule_declared_out_of_place():
    """Its sums are stored in the input, which is read-only then."""
    text = allpairs(4, 2).replace('inplace="1" outofplace="0"', 'inplace="0" outofplace="1"')
    with pytest.raises(ScheduleError, match="expected the output or scratch, got input chunk"):
        check(read(text), 1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'depid="6" deps="5"',
            'depid="6" deps="9"',
            "depid, deps: expected a <tb> and a <step> of this <gpu>, got '6', '9'",
        ),
        (
            'depid="0" deps="1"',
            'depid="-1" deps="-1"',
            "expected initialised data to read|expected an order relative to",
        ),
        ('s_chunks="6"', 's_chunks="5"', "expected chunks inside the scratch, which has 5, got s\\[5\\]"),
        ('type="re"', 'type="cpy"', "output chunk 0: expected the sum of chunk 0 of ranks 0..3"),
    ],
)
def test_mutations_are_rejected(old: str, new: str, message: str):
    broken = allpairs(4, 2).replace(old, new)
    assert broken != allpairs(4, 2)
    with pytest.raises(ScheduleError, match=message):
        check(read(broken), 1)
