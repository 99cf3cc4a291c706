"""The engine on many ranks in one process: every algorithm, expected results, any order, bounded memory."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref

import numpy as np
import pytest
from running import Ranks, expected, progress

from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.codec.split import Split
from mpi_gpucomp.core.library import core
from mpi_gpucomp.device import as_buffer, dtype_of_name, get_device
from mpi_gpucomp.engine import native_codec
from mpi_gpucomp.engine.agreement import AgreementCheck
from mpi_gpucomp.engine.coder import Coder
from mpi_gpucomp.engine.engine import Engine
from mpi_gpucomp.engine.program import Blocks, Layout
from mpi_gpucomp.engine.scheduling import Job
from mpi_gpucomp.engine.task import CollectiveTask
from mpi_gpucomp.errors import FrameError
from mpi_gpucomp.schedule.algorithms import algorithms, build
from mpi_gpucomp.schedule.ir import COLLECTIVES
from mpi_gpucomp.trace import RECV
from mpi_gpucomp.transport.loopback import loopback

ALGORITHMS = [(collective, row.name) for collective in COLLECTIVES for row in algorithms(collective)]


@pytest.mark.parametrize(("collective", "name"), ALGORITHMS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 16])
def test_every_algorithm_gives_the_expected_result(collective, name, ranks):
    for root in {0, ranks - 1} if COLLECTIVES[collective].rooted else {0}:
        for count, codec, dtype in (
            (0, "none", "float32"),
            (1, "split", "float64"),
            (3, "none", "int16"),
            (333, "split", "float32"),
            (333, "none", "float64"),
            (334, "none", "float64"),
        ):
            raw = codec == "none" and bool(count % 2)
            run = Ranks(build(collective, name, ranks, root), count, codec, dtype, raw=raw)
            run.drive()
            for rank, output in enumerate(run.outputs):
                wanted = expected(collective, run.inputs, rank, root, "sum")
                assert wanted is None or output.tobytes() == wanted.astype(dtype).tobytes(), (root, count, rank)


@pytest.mark.parametrize("op", ["prod", "min", "max"])
@pytest.mark.parametrize("name", [row.name for row in algorithms("allreduce")])
def test_operations_other_than_sums(name, op):
    run = Ranks(build("allreduce", name, 5), 200, "split", "float32", op=op)
    run.drive()
    for rank, output in enumerate(run.outputs):
        assert np.array_equal(output, expected("allreduce", run.inputs, rank, 0, op))


@pytest.mark.parametrize("name", [row.name for row in algorithms("broadcast")])
def test_a_lossy_broadcast_encodes_once_with_any_algorithm(name):
    codec = "bound:abs=0.3"
    once = Ranks(build("broadcast", name, 2), 400, codec, "float32")
    many = Ranks(build("broadcast", name, 8), 400, codec, "float32")
    for run in (once, many):
        run.drive()
    assert len({output.tobytes() for output in many.outputs[1:]}) == 1
    assert np.abs(many.outputs[1] - many.inputs[0]).max() <= 0.3
    assert many.outputs[0].tobytes() == many.inputs[0].tobytes(), "the root's buffer is unchanged"


# Recursive doubling adds what a rank has to what its peer has sent, so there ranks differ by as much as the codec errs.
@pytest.mark.parametrize("name", [row.name for row in algorithms("allreduce") if row.name != "recursive_doubling"])
def test_a_lossy_allreduce_is_identical_on_all_ranks(name):
    run = Ranks(build("allreduce", name, 6), 400, "bound:abs=0.1", "float32", same_everywhere=True)
    run.drive()
    assert len({output.tobytes() for output in run.outputs}) == 1
    wanted = expected("allreduce", run.inputs, 0, 0, "sum")
    assert np.abs(run.outputs[0] - wanted).max() <= 0.1 * 12


def test_a_damaged_frame_is_an_error_with_its_location():
    run = Ranks(build("broadcast", "chain", 2), 100, "none", "float32")
    run.wires[0].damage(tag=0, at=0, how="flip", seed=1)
    with pytest.raises(
        FrameError, match=r"^rank 1: test, chunk 0 of loop 0, from rank 0: expected the checksum 0x\w+, got 0x\w+\. "
    ):
        run.drive()


class InPython(Split):
    """A codec that the core does not know, so that its chunks are encoded and decoded in Python."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_collective_completes_after_its_last_copy(ranks):
    run = Ranks(build("allgather", "ring", ranks), 500_000, InPython(), "float32", chunk=500_000, inline=False)
    gates = [threading.Event() for _ in range(ranks)]
    for coder, gate in zip(run.coders, gates, strict=True):
        coder.stream.run(lambda gate=gate: gate.wait(30))
    for _ in range(100):
        run.progress()
    assert not any(task.done for task in run.tasks)
    for gate in gates:
        gate.set()
    run.drive()
    assert all(output.tobytes() == np.concatenate(run.inputs).tobytes() for output in run.outputs)


@pytest.mark.parametrize("name", [row.name for row in algorithms("allreduce")])
def test_codecs_in_python_and_in_the_core_agree(name):
    outputs = []
    for codec in (InPython(), "split"):
        run = Ranks(build("allreduce", name, 4), 500, codec, "float32")
        run.drive()
        outputs.append([output.tobytes() for output in run.outputs])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("seed", range(8))
def test_messages_may_be_late(seed):
    run = Ranks(build("allreduce", "ring", 4), 700, "split", "float32", network=loopback(4, delay=6, seed=seed))
    run.drive()
    assert all(np.array_equal(output, expected("allreduce", run.inputs, 0, 0, "sum")) for output in run.outputs)


def submitted(ranks: int, count: int, *, shuffled: bool) -> tuple[list[Engine], list[Job], dict]:
    """Submit named collectives of several kinds and sizes to engines of two slots, in the same or in random orders."""
    choice, networks = random.Random(1), loopback(ranks)
    kinds = [
        (choice.choice(["broadcast", "allreduce"]), choice.choice([1, 900, 9000]), choice.randrange(ranks))
        for _ in range(count)
    ]
    engines, jobs, data = [], [], {}
    for rank in range(ranks):
        engine, coder = Engine(networks[rank], slots=2), Coder(get_codec("none"), get_device("host"), inline=True)
        engines.append(engine)
        order = list(range(count))
        if shuffled:
            random.Random(rank).shuffle(order)
        for number in order:
            kind, length, root = kinds[number]
            values = data[rank, number] = np.full(length, rank + number, np.float32)
            blocks = Blocks.even(as_buffer(values), 1)
            algorithm = build(kind, algorithms(kind)[0].name, ranks, root if kind == "broadcast" else 0, in_place=True)
            layout = Layout(algorithm.spec, blocks, blocks, 1024)
            task = CollectiveTask(
                algorithm, layout, blocks.buffer.dtype, coder, networks[rank], engine.free_tag(), name=kind
            )
            jobs.append(Job(task, name=f"c{number}"))
            engine.submit(jobs[-1])
    wanted = {
        (rank, number): root + number if kind == "broadcast" else sum(range(ranks)) + ranks * number
        for rank in range(ranks)
        for number, (kind, _, root) in enumerate(kinds)
    }
    return engines, jobs, {key: (data[key], wanted[key]) for key in data}


@pytest.mark.parametrize("shuffled", [False, True])
def test_ranks_may_start_collectives_in_any_order(shuffled):
    engines, jobs, results = submitted(8, 100, shuffled=shuffled)
    deadline = time.monotonic() + 60
    while not all(engine.idle for engine in engines):
        for engine in engines:
            engine.progress()
        assert time.monotonic() < deadline, f"{sum(job.finished for job in jobs)} of {len(jobs)} are finished"
    assert [job.error for job in jobs if job.error] == []
    for values, wanted in results.values():
        assert (values == wanted).all()
    assert not shuffled or sum(job.preempted for job in jobs) > 0


def test_a_failed_collective_frees_its_slot():
    class Broken(AgreementCheck):
        def progress(self):
            raise ValueError("broken")

    engine, job = Engine(loopback(1)[0], slots=1), Job(Broken("allreduce"))
    engine.submit(job)
    engine.progress()
    assert job.finished and isinstance(job.error, ValueError) and engine.idle


def test_staging_is_bounded_for_any_message_size():
    def most_in_use(count: int) -> int:
        run = Ranks(build("broadcast", "chain", 3), count, "none", "float32", chunk=1000)
        before, most = core().gc_memory_in_use(), 0
        while not all(task.done for task in run.tasks):
            run.progress()
            most = max(most, core().gc_memory_in_use() - before)
        return most

    # Each of the three ranks has room for a few messages ahead, and holds what it sends on.
    assert max(most_in_use(40_000), most_in_use(400_000)) <= 3 * 6 * 4096


def test_memory_does_not_grow_with_the_number_of_lengths(monkeypatch):
    monkeypatch.setattr(native_codec, "MAX_RECORDED", 8)
    codec, dtype = Split(), dtype_of_name("float32")
    run = Ranks(build("broadcast", "chain", 2), 77, codec, "float32")
    in_use = weakref.ref(native_codec.native_codec(codec, dtype))
    for length in range(1, 100):
        native_codec.native_codec(codec, dtype).record([length], "sum")
        assert len(native_codec.native_codec(codec, dtype)._recorded) < 10
    run.drive()  # with recordings of its own
    assert np.array_equal(run.outputs[1], run.inputs[0])
    assert in_use() is not None
    del run
    gc.collect()
    assert in_use() is None


def receives(task: CollectiveTask) -> int:
    return sum(transfer.kind == RECV for transfer in task.in_flight())


@pytest.mark.parametrize(("codec", "ahead"), [("none", 8), ("split", 2)])
def test_receives_that_need_no_staging_are_posted_further_ahead(codec, ahead):
    run = Ranks(build("broadcast", "chain", 2), 20_000, codec, "float32", chunk=1000, raw=codec == "none")
    progress(run.wires[1], run.tasks[1])
    assert receives(run.tasks[1]) == ahead
    run.drive()
    assert np.array_equal(run.outputs[1], run.outputs[0])


def broadcast_job(engine: Engine, name: str, values: np.ndarray) -> Job:
    """Submit a broadcast from rank 0 along a chain."""
    algorithm, blocks = build("broadcast", "chain", engine.size), Blocks.even(as_buffer(values), 1)
    layout, coder = (
        Layout(algorithm.spec, blocks, blocks, 100),
        Coder(get_codec("none"), get_device("host"), inline=True),
    )
    tag = engine.free_tag()
    task = CollectiveTask(algorithm, layout, blocks.buffer.dtype, coder, engine.wire, tag, name="broadcast", raw=True)
    job = Job(task, name=name)
    engine.submit(job)
    return job


def progress_until(engines: list[Engine], jobs: list[Job]) -> None:
    """Progress engines until jobs have finished without errors."""
    deadline = time.monotonic() + 30
    while not all(job.finished for job in jobs):
        for engine in engines:
            engine.progress()
        assert time.monotonic() < deadline, "timed out"
    assert [job.error for job in jobs if job.error] == []


def test_receives_are_posted_before_the_peers_have_joined():
    engines = [Engine(wire, slots=1) for wire in loopback(3)]
    data = [np.full(1000, rank, np.float32) for rank in range(3)]
    early = broadcast_job(engines[1], "early", data[1])
    assert early.needs == {0, 2} and not early.started and receives(early.task) == 8
    others = [broadcast_job(engines[rank], "early", data[rank]) for rank in (0, 2)]
    progress_until(engines, [early, *others])
    assert all((values == 0).all() for values in data)


def test_receives_that_were_posted_early_are_withdrawn_when_another_job_gets_the_slot():
    engines = [Engine(wire, slots=1) for wire in loopback(2)]
    data = {name: [np.full(1000, rank, np.float32) for rank in range(2)] for name in ("early", "other")}
    early = broadcast_job(engines[1], "early", data["early"][1])
    other = [broadcast_job(engines[rank], "other", data["other"][rank]) for rank in (1, 0)]
    assert receives(early.task) == 8 and receives(other[0].task) == 0
    engines[1].progress()
    assert other[0].started and receives(early.task) == 0
    progress_until(engines, other)
    progress_until(engines, [early, broadcast_job(engines[0], "early", data["early"][0])])
    assert all((values == 0).all() for both in data.values() for values in both)


def test_a_sender_waits_for_the_neighbours_of_its_receiver():
    engines = [Engine(wire) for wire in loopback(4)]
    data = [np.full(200, rank, np.float32) for rank in range(4)]
    jobs = [broadcast_job(engines[rank], "", data[rank]) for rank in (0, 1, 3)]
    assert receives(jobs[1].task) == 1
    for _ in range(1000):
        for engine in engines:
            engine.progress()
    assert jobs[0].started and not jobs[1].started and not jobs[0].finished
    progress_until(engines, [*jobs, broadcast_job(engines[2], "", data[2])])
    assert all((values == 0).all() for values in data)
