"""Sketches: TACCL's fields, their mistakes, and what is derived from a topology."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_topology import two_nodes

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.schedule.sketch import Sketch, derived, read_sketch, rotation
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
"""The example that TACCL has for two DGX-2."""


def read(tmp_path: Path, document: Any, ranks: int = 32, name: str = "dgx2") -> Sketch:
    file = tmp_path / "sketch.json"
    file.write_text(json.dumps(document))
    return read_sketch(file, preset(name, ranks))


def test_taccls_example(tmp_path: Path):
    sketch = read(tmp_path, DGX2)
    topology = preset("dgx2", 32)
    assert sketch.symmetries == ((2, 16), (16, 32))
    assert (sketch.chunkup, sketch.connections, sketch.in_order) == (2, 1, True)
    assert sketch.sender_of[0] == sketch.sender_of[1] == 1
    assert sketch.allows(topology, 0, 15)
    assert sketch.allows(topology, 1, 16)
    assert not sketch.allows(topology, 1, 17)
    assert not sketch.allows(topology, 0, 16)


def test_the_least_sketch(tmp_path: Path):
    assert read(tmp_path, {}) == Sketch()
    assert read(tmp_path, {"internode_sketch": {"internode_conn": "fully-connected"}}).internode is None
    assert read(tmp_path, {"intranode_sketch": {"strategy": "maxmin"}}).connections == -1


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"nnodes": 3}, "nnodes: expected 2, as topology dgx2, 2 nodes has, got 3."),
        ({"nodes": 2}, "expected fields among nnodes, intranode_sketch, internode_sketch, symmetry_offsets, hyperpara"),
        (
            {"intranode_sketch": {"strategy": "star"}},
            'intranode_sketch: strategy: expected one of switch, minmax, maxmin, none, got "star".',
        ),
        ({"intranode_sketch": {"strategy": "switch"}}, "intranode_sketch: expected a field 'switches', got none."),
        (
            {"intranode_sketch": {"strategy": "switch", "switches": [[0, 16]]}},
            "intranode_sketch: switches[0][1]: expected a whole number from 0 to 15, got 16.",
        ),
        (
            {"intranode_sketch": {"strategy": "switch", "switches": [[0]], "switch_hyperedge_strategy": ["uc"]}},
            'intranode_sketch: switch_hyperedge_strategy[0]: expected one of uc-min, uc-max, got "uc".',
        ),
        (
            {"internode_sketch": {"internode_conn": {"20": [0]}}},
            "internode_sketch: internode_conn: expected ranks of a node, from 0 to 15, as names, got '20'.",
        ),
        (
            {"internode_sketch": {"internode_conn": {"1": [0]}, "gpus_to_sender_rev_map": {"2": [3]}}},
            "internode_sketch: gpus_to_sender_rev_map: 2: expected a sender that internode_conn names, got '2'.",
        ),
        (
            {"internode_sketch": {"gpus_to_sender_rev_map": {"2": [3], "4": [3]}}},
            "internode_sketch: gpus_to_sender_rev_map: 4: expected one sender for each rank, got two for rank 3.",
        ),
        ({"internode_sketch": {"enforce_ordering": 1}}, "internode_sketch: enforce_ordering: expected true or false, "),
        (
            {"symmetry_offsets": [[2, 7]]},
            "symmetry_offsets[0]: expected an offset below its group, and a group that divides the 32 ranks, ",
        ),
        (
            {"symmetry_offsets": [[1, 16]]},
            "symmetry_offsets[0]: expected a rotation that maps the links of topology dgx2, 2 nodes onto each other, ",
        ),
        ({"hyperparameters": {"input_chunkup": 0}}, "hyperparameters: input_chunkup: expected a whole number from 1 "),
    ],
)
def test_mistakes(tmp_path: Path, document: Any, said: str):
    with pytest.raises(SpecError) as caught:
        read(tmp_path, document)
    assert str(caught.value).startswith(f"sketch {tmp_path / 'sketch.json'}: {said}")


def test_derived():
    assert derived(two_nodes(pairs={}), rooted=False) == Sketch(symmetries=((1, 2), (2, 4)))
    assert derived(two_nodes(pairs={}), rooted=True) == Sketch(chunkup=2)
    assert derived(two_nodes(), rooted=False, chunkup=3) == Sketch(chunkup=3), "a missing link is no symmetry"
    many = derived(preset("dgx2", 64), rooted=False)
    assert sorted(many.internode or {}) == list(range(0, 16, 2)), "one for each card"
    assert many.symmetries == ((16, 64),)
    assert derived(preset("dgx-a100", 32), rooted=False).symmetries == ((1, 8), (8, 32))


def test_rotations():
    assert rotation(8, 1, 4) == (1, 2, 3, 0, 5, 6, 7, 4)
    assert rotation(4, 2, 4) == (2, 3, 0, 1)
