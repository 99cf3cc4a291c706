"""MSCCL XML: real files, round trips of our own, and errors for invalid files."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interpreter import run

from mpi_gpucomp.errors import ScheduleError
from mpi_gpucomp.schedule import COLLECTIVES, Lane, Place, Step, checked
from mpi_gpucomp.schedule.algorithms import algorithms, build
from mpi_gpucomp.schedule.msccl_xml import MAX_LENGTH, read, read_header, write
from mpi_gpucomp.schedule.verify import check

RING = """\
<algo name="allreduce_ring" proto="Simple" nchannels="1" nchunksperloop="2" ngpus="2" coll="allreduce" inplace="1">
  <gpu id="0" i_chunks="2" o_chunks="0" s_chunks="0">
    <tb id="0" send="1" recv="1" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="rrcs" srcbuf="i" srcoff="1" dstbuf="i" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="2" type="r" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
  <gpu id="1" i_chunks="2" o_chunks="0" s_chunks="0">
    <tb id="0" send="0" recv="0" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="1" dstbuf="i" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="rrcs" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="2" type="r" srcbuf="i" srcoff="1" dstbuf="i" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
</algo>
"""

SCRATCH = """\
<?xml version="1.0"?>
<!-- All pairs, on two channels, through scratch. Blocks and steps have arbitrary numbers. -->
<algo name="pairs" coll="reduce_scatter" nchunksperloop="4" minBytes="0" maxBytes="1048576">
  <gpu id="1" i_chunks="4" o_chunks="2" s_chunks="2">
    <tb id="7" send="0" recv="0" chan="0">
      <step s="10" type="s" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0"/>
      <step s="20" type="r" srcbuf="i" srcoff="2" dstbuf="s" dstoff="0" hasdep="1"/>
    </tb>
    <tb id="3" send="0" recv="0" chan="1">
      <step s="0" type="s" srcbuf="i" srcoff="1" dstbuf="s" dstoff="1"/>
      <step s="1" type="r" srcbuf="i" srcoff="3" dstbuf="s" dstoff="1" hasdep="1"/>
    </tb>
    <tb id="5" send="-1" recv="-1" chan="0">
      <step s="0" type="cpy" srcbuf="i" srcoff="2" dstbuf="o" dstoff="0" cnt="2"/>
      <step s="1" type="nop" srcbuf="i" srcoff="-1" dstbuf="o" dstoff="-1" cnt="0" depid="7" deps="20"/>
      <step s="2" type="re" srcbuf="s" srcoff="0" dstbuf="o" dstoff="0" cnt="2" depid="3" deps="1"/>
    </tb>
  </gpu>
  <gpu id="0" i_chunks="4" o_chunks="2">
    <tb id="0" send="1" recv="1">
      <step type="s" srcbuf="i" srcoff="2"/>
      <step type="rrc" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0"/>
    </tb>
    <tb id="1" send="1" recv="1" chan="1">
      <step type="s" srcbuf="i" srcoff="3"/>
      <step type="rrc" srcbuf="i" srcoff="1" dstbuf="o" dstoff="1"/>
    </tb>
  </gpu>
</algo>
"""


def error_of(text: str | Path) -> str:
    with pytest.raises(ScheduleError) as caught:
        read(text)
    return str(caught.value)


def test_ring_of_two_ranks():
    algorithm = checked(read(RING))
    assert (algorithm.name, algorithm.collective, algorithm.ranks) == ("allreduce_ring", "allreduce", 2)
    assert (algorithm.chunks, algorithm.in_place, algorithm.root) == (2, True, None)
    place = [Place("i", chunk) for chunk in range(2)]
    steps = (Step("s", place[0]), Step("rrcs", place[1], place[1]), Step("r", None, place[0]))
    assert algorithm.programs[0].lanes == (Lane(1, 1, 0, steps),)
    run(algorithm)


def test_channels_scratch_nops_and_gaps_in_numbering():
    algorithm = checked(read(SCRATCH))
    assert (algorithm.collective, algorithm.ranks, algorithm.chunks) == ("reduce_scatter", 2, 4)
    assert [step.after for step in algorithm.programs[1].lanes[2].steps] == [(), ((0, 1),), ((1, 1),)]
    run(algorithm)


def test_file(tmp_path: Path):
    path = tmp_path / "ring.xml"
    path.write_text("\ufeff" + RING, encoding="utf-8")
    assert read(path) == read(str(path)) == read(RING)


@pytest.mark.parametrize("spelling", ["allreduce", "AllReduce", "all_reduce", "all-reduce"])
def test_spellings_of_a_collective(spelling: str):
    assert read(RING.replace('"allreduce"', f'"{spelling}"')) == read(RING)


@pytest.mark.parametrize(("spelling", "collective"), [("reducescatter", "reduce_scatter"), ("bcast", "broadcast")])
def test_short_spellings_of_collectives(spelling: str, collective: str):
    assert read(f'<algo name="a" coll="{spelling}"><gpu id="0" i_chunks="1"/></algo>').collective == collective


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
@pytest.mark.parametrize(
    ("collective", "name"), [(collective, info.name) for collective in COLLECTIVES for info in algorithms(collective)]
)
def test_round_trip(collective: str, name: str, ranks: int, in_place: bool):
    nodes = [range(ranks)[::2], range(ranks)[1::2]] if ranks > 1 else None
    algorithm = build(collective, name, ranks, ranks // 2, nodes, in_place)
    back = read(write(algorithm))
    check(back, in_flight=1)
    run(back)
    assert (back.name, back.collective, back.root) == (name, collective, algorithm.root)
    assert back.in_place == algorithm.in_place
    assert read(write(back)) == back
    if all(len(step.after) < 2 for program in algorithm.programs for _, _, step in program.steps()):
        assert back == algorithm


def test_several_dependencies_become_nops():
    text = write(build("gather", "binomial", 4))
    assert text.splitlines()[:2] == [
        '<algo name="binomial" proto="Simple" nchannels="1" nchunksperloop="4" ngpus="4" coll="gather" inplace="0" '
        'root="0">',
        '  <gpu id="0" i_chunks="1" o_chunks="4" s_chunks="0">',
    ]
    assert (
        """\
    <tb id="0" send="-1" recv="-1" chan="0">
      <step s="0" type="cpy" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="1" />
    </tb>
    <tb id="1" send="-1" recv="3" chan="0">
      <step s="0" type="r" srcbuf="s" srcoff="1" dstbuf="s" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="1" />
    </tb>
    <tb id="2" send="0" recv="-1" chan="0">
      <step s="0" type="nop" srcbuf="i" srcoff="-1" dstbuf="o" dstoff="-1" cnt="0" depid="1" deps="0" hasdep="0" />
      <step s="1" type="s" srcbuf="s" srcoff="0" dstbuf="s" dstoff="0" cnt="2" depid="0" deps="0" hasdep="0" />
    </tb>
"""
        in text
    )


def test_dependencies_on_steps_after_nops():
    lanes = (
        Lane(None, None, 0, (Step("cpy", Place("i", 0), Place("s", 0)),)),
        Lane(None, None, 1, (Step("cpy", Place("i", 0), Place("s", 1)),)),
        Lane(None, None, 2, (Step("cpy", Place("s", 0), Place("s", 2), after=((0, 0), (1, 0))),)),
        Lane(None, None, 3, (Step("cpy", Place("s", 2), Place("o", 0), after=((2, 0),)),)),
    )
    one = build("allreduce", "tree", 1)
    algorithm = type(one)("nops", "allreduce", 1, 1, False, (type(one.programs[0])(1, 1, 3, lanes),))
    check(algorithm)
    back = read(write(algorithm))
    assert back.programs[0].lanes[3].steps[0].after == ((2, 1),)
    check(back)


INVALID = [
    ('coll="allreduce"', "", "MSCCL XML: <algo>: coll: expected a value, got none. Correct the file."),
    (
        'coll="allreduce"',
        'coll="scan"',
        "MSCCL XML: <algo>: coll: expected one of broadcast, reduce, allreduce, allgather, reduce_scatter, alltoall, "
        "gather, scatter, got 'scan'. Correct the file.",
    ),
    (
        'ngpus="2"',
        'ngpus="3"',
        "MSCCL XML: <algo>: ngpus: expected one <gpu> for each id from 0 to ngpus - 1, got ids 0, 1. Correct the file.",
    ),
    (
        'nchunksperloop="2"',
        'nchunksperloop="two"',
        "MSCCL XML: <algo>: nchunksperloop: expected an integer of at least 0, got 'two'. Correct the file.",
    ),
    (
        '<gpu id="1"',
        "<gpu",
        "MSCCL XML: <algo> <gpu>: id: expected an integer of at least 0, got none. Correct the file.",
    ),
    (
        'send="1" recv="1"',
        'send="-2" recv="1"',
        "MSCCL XML: <algo> <gpu id=0> <tb id=0>: send: expected an integer of at least -1, got '-2'. Correct the file.",
    ),
    (
        'type="rrcs" srcbuf="i" srcoff="1"',
        'type="rrsc" srcbuf="i" srcoff="1"',
        "MSCCL XML: <algo> <gpu id=0> <tb id=0> <step s=1>: type: expected one of s, r, rcs, rrs, rrc, rrcs, cpy, re, "
        "nop, got 'rrsc'. Correct the file.",
    ),
    (
        'type="s" srcbuf="i" srcoff="0"',
        'type="s" srcbuf="x" srcoff="0"',
        "MSCCL XML: <algo> <gpu id=0> <tb id=0> <step s=0>: srcbuf: expected one of i, o, s, got 'x'. "
        "Correct the file.",
    ),
    (
        'type="s" srcbuf="i" srcoff="0"',
        'type="s" srcbuf="i" srcoff="-1"',
        "MSCCL XML: <algo> <gpu id=0> <tb id=0> <step s=0>: srcoff: expected an integer of at least 0, got '-1'. "
        "Correct the file.",
    ),
    (
        'cnt="1" depid="-1" deps="-1"',
        'cnt="1" depid="0" deps="9"',
        "MSCCL XML: <algo> <gpu id=0> <tb id=0> <step s=0>: depid, deps: expected a <tb> and a <step> of this <gpu>, "
        "got '0', '9'. Correct the file.",
    ),
    (
        '<step s="1"',
        '<step s="0"',
        "MSCCL XML: <algo> <gpu id=0> <tb id=0>: s: expected a distinct number for each <step>, "
        "got a duplicate. Correct the file.",
    ),
    (
        "</tb>",
        '</tb><tb id="0"/>',
        "MSCCL XML: <algo> <gpu id=0>: id: expected a distinct id for each <tb>, got a duplicate. Correct the file.",
    ),
    (
        "</tb>",
        "</tb><td/>",
        "MSCCL XML: <algo> <gpu id=0>: expected only <tb> elements inside, got <td>. Correct the file.",
    ),
    (
        "</algo>",
        "",
        "MSCCL XML: expected well-formed XML, got no element found: line 17, column 0. Correct the file.",
    ),
]


@pytest.mark.parametrize(("right", "wrong", "message"), INVALID)
def test_errors_of_invalid_files(right: str, wrong: str, message: str):
    assert right in RING
    assert error_of(RING.replace(right, wrong, 1)) == message


def test_other_xml():
    assert error_of("<html/>") == (
        "MSCCL XML: <html>: expected <algo> as the outermost element, got <html>. Correct the file."
    )


def test_declarations_are_rejected():
    bomb = '<!DOCTYPE a [<!ENTITY b "bbbb"><!ENTITY c "&b;&b;">]>' + RING.replace("allreduce_ring", "&c;")
    message = "MSCCL XML: expected only elements and comments, got a declaration (<!...>). Remove it."
    assert error_of(bomb) == message
    assert error_of('<?xml version="1.0"?>\n<!DOCTYPE a SYSTEM "file:///etc/passwd"><algo/>') == message


def test_oversized_files_are_rejected(tmp_path: Path):
    path = tmp_path / "giant.xml"
    with path.open("wb") as file:
        file.truncate(MAX_LENGTH + 1)
    assert error_of(path) == (
        f"MSCCL XML {path}: expected a readable file, got more than {MAX_LENGTH} bytes. Name another file."
    )
    wide = read(RING.replace('i_chunks="2" o_chunks="0" s_chunks="0"', 'i_chunks="2" s_chunks="999999999"'))
    with pytest.raises(ScheduleError, match="scratch: expected 0 to 1048576 chunks, got 999999999"):
        check(wide)


def test_unreadable_files(tmp_path: Path):
    assert error_of(tmp_path / "none.xml") == (
        f"MSCCL XML {tmp_path}/none.xml: expected a readable file, got No such file or directory. Name another file."
    )
    path = tmp_path / "binary.xml"
    path.write_bytes(b"\xff\xfe\xfd")
    assert error_of(str(path)) == (
        f"MSCCL XML {path}: expected a readable file, got bytes that are not UTF-8. Name another file."
    )


def test_errors_name_the_file(tmp_path: Path):
    path = tmp_path / "ring.xml"
    path.write_text(RING.replace('cnt="1"', 'cnt="0"', 1))
    assert error_of(path) == (
        f"MSCCL XML {path}: <algo> <gpu id=0> <tb id=0> <step s=0>: cnt: expected an integer of at least 1, got '0'. "
        "Correct the file."
    )
    path.write_text(RING[: len(RING) // 2])
    assert error_of(path).startswith(f"MSCCL XML {path}: expected well-formed XML, got ")
    assert error_of("\0") == "MSCCL XML \0: expected a readable file, got embedded null byte. Name another file."


def test_number_of_gpus():
    ids = "MSCCL XML: <algo>: ngpus: expected one <gpu> for each id from 0 to ngpus - 1, got ids {}. Correct the file."
    assert error_of(RING.replace('ngpus="2"', f'ngpus="{10**18}"')) == ids.format("0, 1")
    assert error_of(RING.replace('gpu id="1"', 'gpu id="0"')) == ids.format("0, 0")
    assert error_of('<algo name="a" coll="bcast"/>') == ids.format("none")


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ('topology="../other"', "topology: expected the hash of a topology, got '../other'."),
        ('minBytes="9" maxBytes="8"', "minBytes: expected at most maxBytes, 8, got '9'."),
        ('maxBytes="1e6"', "maxBytes: expected an integer of at least 0, got '1e6'."),
    ],
)
def test_errors_of_invalid_headers(attributes: str, message: str):
    with pytest.raises(ScheduleError) as caught:
        read_header(f"<algo {attributes}/>")
    assert str(caught.value) == f"MSCCL XML: <algo>: {message} Correct the file."


@given(st.data())
def test_damaged_files_raise_schedule_errors(data: st.DataObject):
    start = data.draw(st.integers(0, len(SCRATCH) - 1))
    end = data.draw(st.integers(start, min(start + 20, len(SCRATCH))))
    text = "<" + (SCRATCH[:start] + data.draw(st.text(max_size=5)) + SCRATCH[end:])[1:]
    with suppress(ScheduleError):
        check(read(text))


def test_devices_and_pipes_are_refused_without_reading_them(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.xml")
    for path in (Path("/dev/zero"), tmp_path / "pipe.xml"):
        with pytest.raises(ScheduleError) as caught:
            read(path)
        assert str(caught.value) == (
            f"MSCCL XML {path}: expected a readable file, got something that is not a file. Name another file."
        )


def test_a_short_file_cannot_ask_for_the_memory_of_many_chunks() -> None:
    gpus = "".join(f'<gpu id="{rank}" i_chunks="1000000" o_chunks="1000000"/>' for rank in range(12))
    with pytest.raises(ScheduleError) as caught:
        checked(read(f'<algo name="a" coll="allreduce" nchunksperloop="1000000">{gpus}</algo>'))
    assert str(caught.value) == (
        "algorithm a: chunks: expected at most 4194304 on all ranks, with scratch memory, got 12000000. "
        "Use fewer chunks."
    )
