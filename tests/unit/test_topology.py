"""Topologies: costs of links and ports, files and their errors, presets."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.cost import PER_MB, CodecCost, LinkCost, MessageCost
from mpi_gpucomp.schedule.topology import (
    MAX_FILE_BYTES,
    PRESETS,
    Port,
    ProcessorModel,
    Topology,
    even_nodes,
    preset,
    read_topology,
    write_topology,
)

FAST, SLOW = LinkCost(2e-6, 150 * PER_MB), LinkCost(60e-6, 8000 * PER_MB)


def two_nodes(**changes: Any) -> Topology:
    """Return a topology of two nodes of two ranks, each with one network card."""
    ports = [
        Port(f"node {number}, {direction}", frozenset(node), direction, 8000 * PER_MB, "between")
        for number, node in enumerate(((0, 1), (2, 3)))
        for direction in ("out", "in")
    ]
    fields: dict[str, Any] = {
        "name": "two nodes",
        "nodes": ((0, 1), (2, 3)),
        "classes": {"memory": FAST, "network": SLOW},
        "within": "memory",
        "between": "network",
        "pairs": {(0, 3): None},
        "ports": tuple(ports),
        "codecs": {"zfp:rate=8": CodecCost(700 * PER_MB, 900 * PER_MB, 4.0)},
        "processors": (ProcessorModel(frozenset(range(4)), 2),),
        "per_chunk": 1e-4,
        "source": "by hand",
    }
    return Topology(**fields | changes)


def test_links_and_ports():
    topology = two_nodes()
    assert topology.ranks == 4
    assert topology.link(0, 1) == FAST
    assert topology.link(1, 2) == SLOW
    assert topology.link(0, 3) is None
    assert topology.link(2, 2) is None
    assert len(list(topology.links())) == 11
    assert topology.ports_of(0, 1) == []
    assert [topology.ports[number].name for number in topology.ports_of(3, 1)] == ["node 1, out", "node 0, in"]
    assert [topology.node_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert topology.position(3) == 1


def test_the_slowest_of_link_and_ports_counts():
    port = Port("uplink", frozenset({0, 1}), "out", 1e-6)
    assert two_nodes(ports=(port,)).unloaded_link(1, 2) == LinkCost(60e-6, 1e-6)
    assert two_nodes(ports=(port,)).unloaded_link(2, 1) == SLOW
    assert two_nodes().unloaded_link(0, 3) is None


def test_file_round_trip(tmp_path: Path):
    topology = two_nodes()
    write_topology(topology, tmp_path / "topo.json", fitted={"rms": 0.01})
    read = read_topology(tmp_path / "topo.json")
    assert read.document() == topology.document()
    assert read.classes["network"] == pytest.approx(SLOW)
    assert read.hash == topology.hash


def test_relays_in_the_file(tmp_path: Path):
    for relay_bytes in (0, 1 << 20):
        write_topology(two_nodes(relay_bytes=relay_bytes), tmp_path / "topo.json")
        assert read_topology(tmp_path / "topo.json").relay_bytes == relay_bytes
    document = two_nodes().document()
    assert document.pop("relay_bytes") == 1 << 16
    (tmp_path / "older.json").write_text(json.dumps(document))
    assert read_topology(tmp_path / "older.json").relay_bytes == 1 << 16


def test_message_costs_in_the_file(tmp_path: Path):
    topology = two_nodes(
        message_cost=MessageCost(5e-5, 6e-10, 1e-3, 2e-4), processors=(ProcessorModel(frozenset(range(4)), 1.25),)
    )
    write_topology(topology, tmp_path / "topo.json")
    read = read_topology(tmp_path / "topo.json")
    assert read.message_cost == pytest.approx(topology.message_cost)
    assert read.processors == topology.processors


def test_the_hash_depends_on_the_shape_only():
    same = two_nodes(classes={"memory": FAST, "network": LinkCost(1e-6, 1e-9)}, codecs={}, name="other")
    assert same.hash == two_nodes().hash
    assert two_nodes(pairs={}).hash != two_nodes().hash
    assert two_nodes(nodes=((0, 2), (1, 3))).hash != two_nodes().hash


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["nodes"], [[0, 1], [1]], "nodes: expected each rank from 0 on exactly once, and no empty node, "),
        (["nodes"], [[0, "a"]], 'nodes[0][1]: expected an integer of at least 0, got "a". '),
        (
            ["classes", "memory"],
            {"alpha_us": -1},
            "classes: memory: alpha_us: expected a number of at least 0, got -1. ",
        ),
        (["classes", "memory"], {"alpha": 1}, "classes: memory: expected fields among alpha_us, beta_us_per_MB, got "),
        (["links", "within"], "smoke", 'links: within: expected one of memory, network, got "smoke". '),
        (["links", "within"], [["memory"]], "links: within: expected a list of 2, got "),
        (["links", "pairs"], [[0, 9, "memory"]], "links: pairs[0][1]: expected an integer from 0 to 3, got 9. "),
        (["ports", 0, "way"], "up", 'ports[0]: way: expected one of out, in, got "up". '),
        (["ports", 0, "ranks"], [1, 1], "ports[0]: ranks: expected each rank once, got [1, 1]. "),
        (["codecs", "zfp:rate=8", "ratio"], 0, "codecs: zfp:rate=8: ratio: expected a number above 0, got 0. "),
        (["processors", 0, "cores"], True, "processors[0]: cores: expected a number of at least 0, got true. "),
        (["processors", 0, "cores"], 0, "processors[0]: cores: expected a number above 0, got 0. "),
        (
            ["handling"],
            {"message": 1},
            "handling: expected fields among message_us, us_per_MB, wait_us, frame_us, got ",
        ),
        (["per_chunk_us"], float("nan"), "per_chunk_us: expected a number of at least 0, got NaN. "),
        (["per_chunk_us"], 10**400, "per_chunk_us: expected a number of at least 0, got 1000000000000"),
        (["per_chunk_us"], "1", 'per_chunk_us: expected a number of at least 0, got "1". '),
        (["relay_bytes"], 0.5, "relay_bytes: expected an integer of at least 0, got 0.5. "),
        (["source"], 3, "source: expected a string, got 3. "),
        (["nodes"], {}, "nodes: expected a list [...], got {}. "),
        (["nodes"], [], "nodes: expected each rank from 0 on exactly once, and no empty node, got []. "),
        (["nodes"], None, "expected a field 'nodes', got none. "),
        (["classes"], {}, "links: within: expected a class that is defined in 'classes', got \"memory\". "),
        (["classes"], [1], "classes: expected an object {...}, got [1]. "),
        (["links"], "memory", 'links: expected an object {...}, got "memory". '),
        (["links", "pairs"], [[0, 1]], "links: pairs[0]: expected a list of 3, got [0, 1]. "),
        (["ports"], [[]], "ports[0]: expected an object {...}, got []. "),
        (["ports", 0], {"name": "a"}, "ports[0]: expected a field 'ranks', got none. "),
        (["codecs"], ["mpc"], 'codecs: expected an object {...}, got ["mpc"]. '),
        (["name"], None, "expected a field 'name', got none. "),
        (["speed"], 1, "expected fields among name, source, nodes, classes, links, ports, codecs, processors, "),
    ],
)
def test_errors_of_invalid_fields(tmp_path: Path, path: list[Any], value: Any, message: str):
    document = two_nodes().document()
    part: Any = document
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    file = tmp_path / "topo.json"
    file.write_text(json.dumps(document))
    with pytest.raises(SpecError) as caught:
        read_topology(file)
    assert str(caught.value).startswith(f"topology {file}: {message}")
    assert str(caught.value).endswith("Correct the file.")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "expected a readable file, got No such file or directory."),
        (b"{", "expected JSON, got Expecting property name enclosed in double quotes: line 1 column 2 (char 1)."),
        (b"[" * 100_000, "expected JSON, got too many levels of nesting."),
        (b"\xff\xfe", "expected JSON, got bytes that are not UTF-8."),
        (b"3", "expected an object {...}, got 3."),
    ],
)
def test_unreadable_files(tmp_path: Path, content: bytes | None, message: str):
    file = tmp_path / "topo.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        read_topology(file)
    assert str(caught.value) == f"topology {file}: {message} Correct the file."


def test_oversized_files(tmp_path: Path):
    file = tmp_path / "topo.json"
    with file.open("wb") as opened:
        opened.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(SpecError, match=f"expected JSON, got more than {MAX_FILE_BYTES} bytes"):
        read_topology(file)


def test_truncated_files(tmp_path: Path):
    file = tmp_path / "topo.json"
    write_topology(two_nodes(), file)
    text = file.read_text().rstrip()
    for length in range(0, len(text), 7):
        file.write_text(text[:length])
        with pytest.raises(SpecError, match=r"topo\.json: expected JSON, got "):
            read_topology(file)


def test_undefined_class():
    with pytest.raises(SpecError) as caught:
        two_nodes(between="smoke")
    expected = "topology two nodes: links: expected classes among memory, network, got 'smoke'. Correct the topology."
    assert str(caught.value) == expected


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str):
    machine = PRESETS[name]
    topology = preset(name, 3 * machine.ranks)
    assert len(topology.nodes) == 3
    assert topology.source
    between = topology.unloaded_link(0, machine.ranks)
    assert between is not None
    assert between.per_byte == pytest.approx(machine.outside[1] * PER_MB)
    assert len(topology.ports_of(0, machine.ranks)) == 2


def test_cube_mesh():
    topology = preset("ndv2", 8)
    links = {"NVLink": 1, "two NVLinks": 2, None: 0}
    table = [[links[topology.class_of(a, b) if a != b else None] for b in range(8)] for a in range(8)]
    assert table == [list(column) for column in zip(*table, strict=True)]
    assert all(sum(row) == 6 for row in table), "a V100 has six NVLinks"


def test_two_ranks_share_a_card_of_a_dgx2():
    topology = preset("dgx2", 32)
    cards = [port for port in topology.ports if port.traffic == "between" and port.direction == "out"]
    assert [sorted(port.ranks) for port in cards[:2]] == [[0, 1], [2, 3]]
    assert len(cards) == 16


def test_unknown_presets_and_partial_nodes():
    with pytest.raises(SpecError) as caught:
        preset("dgx3", 8)
    assert str(caught.value) == (
        "topology: expected one of ndv2, dgx2, dgx-a100, a100-hdr, v100-ib, gigabit, got 'dgx3'. "
        "Use one of these, or a topology file."
    )
    with pytest.raises(SpecError) as caught:
        preset("ndv2", 12)
    assert str(caught.value) == (
        "number of ranks: expected at most 8, or a multiple of the 8 ranks of a node of ndv2, got 12. Use full nodes."
    )
    assert even_nodes(5, 2) == ((0, 1), (2, 3), (4,))


def test_devices_and_pipes_are_refused_without_reading_them(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for path in (Path("/dev/zero"), tmp_path / "pipe.json"):
        with pytest.raises(SpecError, match="expected JSON, got something that is not a file"):
            read_topology(path)
