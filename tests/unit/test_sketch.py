"""Sketches: TACCL's fields, errors of invalid files, and default sketches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_topology import two_nodes

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.sketch import Sketch, default_sketch, read_sketch, rotation
from mpi_gpucomp.schedule.topology import preset

DGX2 = {
    "nnodes": 2,
    "intranode_sketch": {
        "strategy": "switch",
        "switches": [list(range(16))],
        "switch_hyperedge_strategy": ["uc-min"],
    },
    "internode_sketch": {
        "strategy": "relay",
        "internode_conn": {str(odd): [odd - 1] for odd in range(1, 16, 2)},
        "gpus_to_sender_rev_map": {str(odd): [odd - 1, odd] for odd in range(1, 16, 2)},
        "enforce_ordering": True,
    },
    "symmetry_offsets": [[2, 16], [16, 32]],
    "hyperparameters": {"input_chunkup": 2},
}
"""TACCL's example for two DGX-2."""


def read(tmp_path: Path, document: Any, ranks: int = 32, name: str = "dgx2") -> Sketch:
    file = tmp_path / "sketch.json"
    file.write_text(json.dumps(document))
    return read_sketch(file, preset(name, ranks))


def test_example_of_taccl(tmp_path: Path):
    sketch = read(tmp_path, DGX2)
    topology = preset("dgx2", 32)
    assert sketch.symmetries == ((2, 16), (16, 32))
    assert (sketch.chunkup, sketch.connections, sketch.in_order) == (2, 1, True)
    assert sketch.sender_of[0] == sketch.sender_of[1] == 1
    assert sketch.allows(topology, 0, 15)
    assert sketch.allows(topology, 1, 16)
    assert not sketch.allows(topology, 1, 17)
    assert not sketch.allows(topology, 0, 16)


def test_minimal_sketches(tmp_path: Path):
    assert read(tmp_path, {}) == Sketch()
    assert read(tmp_path, {"internode_sketch": {"internode_conn": "fully-connected"}}).internode is None
    assert read(tmp_path, {"intranode_sketch": {"strategy": "maxmin"}}).connections == -1


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"nnodes": 3}, "nnodes: expected 2, as in topology dgx2, 2 nodes, got 3."),
        ({"nodes": 2}, "expected fields among nnodes, intranode_sketch, internode_sketch, symmetry_offsets, hyperpara"),
        (
            {"intranode_sketch": {"strategy": "star"}},
            'intranode_sketch: strategy: expected one of switch, minmax, maxmin, none, got "star".',
        ),
        ({"intranode_sketch": {"strategy": "switch"}}, "intranode_sketch: expected a field 'switches', got none."),
        (
            {"intranode_sketch": {"strategy": "switch", "switches": [[0, 16]]}},
            "intranode_sketch: switches[0][1]: expected an integer from 0 to 15, got 16.",
        ),
        (
            {"intranode_sketch": {"strategy": "switch", "switches": [[0]], "switch_hyperedge_strategy": ["uc"]}},
            'intranode_sketch: switch_hyperedge_strategy[0]: expected one of uc-min, uc-max, got "uc".',
        ),
        (
            {"internode_sketch": {"internode_conn": {"20": [0]}}},
            "internode_sketch: internode_conn: expected ranks of a node, from 0 to 15, as field names, got '20'.",
        ),
        (
            {"internode_sketch": {"internode_conn": {"1": [0]}, "gpus_to_sender_rev_map": {"2": [3]}}},
            "internode_sketch: gpus_to_sender_rev_map: 2: expected a sender listed in internode_conn, got '2'.",
        ),
        (
            {"internode_sketch": {"gpus_to_sender_rev_map": {"2": [3], "4": [3]}}},
            "internode_sketch: gpus_to_sender_rev_map: 4: expected one sender for each rank, got two for rank 3.",
        ),
        (
            {"internode_sketch": {"internode_conn": {"9" * 5000: [0]}}},
            "internode_sketch: internode_conn: expected ranks of a node, from 0 to 15, as field names, got '999",
        ),
        ({"internode_sketch": {"internode_conn": 3}}, "internode_sketch: internode_conn: expected an object {...}, "),
        ({"internode_sketch": []}, "internode_sketch: expected an object {...}, got []."),
        ({"symmetry_offsets": 1}, "symmetry_offsets: expected a list [...], got 1."),
        ([], "expected an object {...}, got []."),
        ({"internode_sketch": {"enforce_ordering": 1}}, "internode_sketch: enforce_ordering: expected true or false, "),
        (
            {"symmetry_offsets": [[2, 7]]},
            "symmetry_offsets[0]: expected an offset below its group, and a group that divides the 32 ranks, ",
        ),
        (
            {"symmetry_offsets": [[1, 16]]},
            "symmetry_offsets[0]: expected a symmetry of topology dgx2, 2 nodes, ",
        ),
        ({"hyperparameters": {"input_chunkup": 0}}, "hyperparameters: input_chunkup: expected an integer from 1 to 64"),
    ],
)
def test_errors_of_invalid_files(tmp_path: Path, document: Any, message: str):
    with pytest.raises(SpecError) as caught:
        read(tmp_path, document)
    assert str(caught.value).startswith(f"sketch {tmp_path / 'sketch.json'}: {message}")


def test_derived():
    assert default_sketch(two_nodes(pairs={}), rooted=False) == Sketch(symmetries=((1, 2), (2, 4)))
    assert default_sketch(two_nodes(pairs={}), rooted=True) == Sketch(chunkup=2)
    assert default_sketch(two_nodes(), rooted=False, chunkup=3) == Sketch(chunkup=3), "a missing link"
    many = default_sketch(preset("dgx2", 64), rooted=False)
    assert sorted(many.internode or {}) == list(range(0, 16, 2)), "one per card"
    assert many.symmetries == ((16, 64),)
    assert default_sketch(preset("dgx-a100", 32), rooted=False).symmetries == ((1, 8), (8, 32))


def test_rotations():
    assert rotation(8, 1, 4) == (1, 2, 3, 0, 5, 6, 7, 4)
    assert rotation(4, 2, 4) == (2, 3, 0, 1)
