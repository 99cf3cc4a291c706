"""What a chunk of a broadcast costs on a GPU: kernels, copies and waits, as the simulated machine counts them."""

from __future__ import annotations

import json
import os

import pytest
from launch import needs_mpirun, run

from simulated_cuda import SETTINGS

CHUNK, CHUNKS = 1 << 18, 17
STREAMS = 3
END_OF_CALL = 2 * STREAMS
"""Waits for streams when the task ends, however many chunks it had."""
NEW_THREADS = 2
"""Threads of a rank that may enter the core for the first time during the counted call, such as its progress thread."""
ROOT_KERNELS = {"none": 1, "zfp:rate=8": 2, "split": 4, "bound:abs=1e-3": 3, "bound:rel=1e-3": 4, "mpc": 3}
"""A kernel more than the codec's writes header and checksum; `none` needs no more than that one."""
DECODE_KERNELS = {"none": 1}
"""All others need 2: one that decodes, and one that verifies the frame."""


@needs_mpirun
@pytest.mark.parametrize("codec", ROOT_KERNELS)
def test_a_chunk_costs_few_kernels_one_copy_and_no_wait(codec: str) -> None:
    program = ("-m", "tests.simulated_cuda", "tests/simulated_cuda/chunk_costs.py", codec, str(CHUNK), str(CHUNKS))
    settings = os.environ.get(SETTINGS) or "seed=1"
    done = run(3, *program, environment={SETTINGS: settings})
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    root, *others = json.loads(done.stdout)
    assert root.get("launches", 0) <= ROOT_KERNELS[codec]
    assert (root["copies"], root["copies_device_to_host"]) == (1, 1), "the frame, and nothing is read back"
    for rank in others:
        assert rank.get("launches", 0) <= DECODE_KERNELS.get(codec, 2)
        assert (rank["copies"], rank["copies_host_to_device"]) == (1, 1)
    for rank in (root, *others):
        assert rank["blocking_waits"] <= END_OF_CALL, "at the end of the call only"
        assert rank.get("context_sets", 0) <= NEW_THREADS / (CHUNKS - 1), "a thread selects its GPU once, not per chunk"
        assert rank["event_records"] <= 3
