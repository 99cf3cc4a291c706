"""The schedule library: which schedule a call gets, and errors of invalid files."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_topology import two_nodes

from mpi_gpucomp.errors import ScheduleError, SpecError
from mpi_gpucomp.schedule.algorithms import build
from mpi_gpucomp.schedule.msccl_xml import ScheduleLibrary, XmlHeader, add_schedule, file_name, write


def test_schedule_of_a_call(tmp_path: Path):
    ring, tree = build("allreduce", "ring", 4), build("allreduce", "tree", 4)
    chain = build("broadcast", "chain", 4, 2)
    for algorithm, header in ((ring, XmlHeader("abc", 100, 1000)), (tree, XmlHeader("abc")), (chain, XmlHeader())):
        (tmp_path / file_name(algorithm, header)).write_text(write(algorithm, header))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "allreduce-4ranks-abc-100-1000.xml",
        "allreduce-4ranks-abc-all.xml",
        "broadcast-4ranks-any-root2-all.xml",
    ]
    library = ScheduleLibrary(tmp_path)

    def name(*call: object, **options: bool) -> str | None:
        found = library.find(*call, **options)  # type: ignore[arg-type]
        return found and found.name

    assert name("allreduce", 4, 500) == "ring"
    assert name("allreduce", 4, 5000) == "tree"
    assert name("allreduce", 5, 500) is None
    assert name("allreduce", 4, 500, in_place=True) is None
    assert name("broadcast", 4, 1, 2) == "chain"
    assert name("broadcast", 4, 1, 1) is None
    on_one_node = ScheduleLibrary(tmp_path, ((0, 1, 2, 3),))
    assert on_one_node.find("allreduce", 4, 500) is None, "its topology is not in the directory"
    assert on_one_node.find("broadcast", 4, 500, 2) is not None, "it is for all topologies"


def test_schedules_are_for_the_nodes_of_their_topology(tmp_path: Path):
    topology = two_nodes()
    path = add_schedule(tmp_path, build("allreduce", "ring", 4), topology, 10, 100)
    assert path.name == f"allreduce-4ranks-{topology.hash}-10-100.xml"
    assert ScheduleLibrary(tmp_path, topology.nodes).find("allreduce", 4, 50) is not None
    assert ScheduleLibrary(tmp_path, topology.nodes).find("allreduce", 4, 101) is None
    assert ScheduleLibrary(tmp_path, ((0, 1, 2, 3),)).find("allreduce", 4, 50) is None


def test_not_a_directory():
    with pytest.raises(SpecError) as caught:
        ScheduleLibrary("/none/such").find("allreduce", 4, 500)
    assert str(caught.value) == (
        "plans: expected a directory, got '/none/such'. "
        "Fill one with `python -m mpi_gpucomp synthesize ... --plans DIR`."
    )


def test_errors_name_the_file(tmp_path: Path):
    topology = two_nodes()
    path = add_schedule(tmp_path, build("broadcast", "chain", 4), topology, 10, 100)
    text = path.read_text()

    def error(nodes: tuple[tuple[int, ...], ...] | None = None) -> str:
        with pytest.raises((ScheduleError, SpecError)) as caught:
            ScheduleLibrary(tmp_path, nodes).find("allreduce", 4, 500)
        return str(caught.value)

    path.write_text(text[:200])
    assert error().startswith(f"MSCCL XML {path}: expected well-formed XML, got ")
    path.write_text(text.replace('type="rcs"', 'type="r"'))
    assert error() == (
        f"rank 2: {path}: algorithm chain: lane 0, step 0 (r from 1): expected a matching send on rank 1, channel 0, "
        "got none. Give every message a send and a receive."
    )
    path.write_text(text)
    topology_file = tmp_path / f"{topology.hash}.json"
    topology_file.write_text("{}")
    assert error(topology.nodes) == f"topology {topology_file}: expected a field 'nodes', got none. Correct the file."
