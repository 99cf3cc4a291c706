"""Collectives that each rank starts in its own order: they complete here, but not on native MPI or gloo.

mpirun -n 8 osu_bench any_order        time shuffled and ordered calls alternately, and verify every result
osu_bench any_order demonstrate        run the same program on mpi_gpucomp, MPI and gloo, and print the outcomes
"""

# MPI is imported where it is used, because a process that has initialised MPI cannot start mpirun.

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpi_gpucomp.cli.command import allgather_json
from osu_bench.arguments import CommandParser
from osu_bench.launcher import find

if TYPE_CHECKING:
    from mpi4py import MPI

Array = np.ndarray[Any, Any]

KINDS = ("bcast", "reduce", "allreduce", "allgather", "reduce_scatter_block", "alltoall", "gather", "scatter")
SEND_TO_EACH = ("reduce_scatter_block", "alltoall", "scatter")
RECEIVE_FROM_EACH = ("allgather", "alltoall", "gather")
REDUCING = ("reduce", "allreduce", "reduce_scatter_block")
FROM_ROOT, TO_ROOT = ("bcast", "scatter"), ("reduce", "gather")
OPERATIONS = {"SUM": np.add, "MAX": np.maximum, "MIN": np.minimum}
CODECS = {"float32": ("none", "split", "mpc", "cast:bf16"), "float64": ("none", "split", "mpc")}
DTYPES = ("float32", "float64", "int32", "int64", "uint8")
LEAST_BYTES = 8
START_LIMIT = 120
"""Seconds after which an attempt that has not completed in order ends itself."""

COMPLAINT = re.compile(r"^rank \d+: .*|\bwhat\(\): .*|^Assertion failed.*|\bSignal: .*", re.MULTILINE)
"""Error lines of this program, C++, MPICH, and Open MPI on a crash."""


@dataclass(frozen=True)
class Collective:
    """A collective; `count` elements are sent to, or received from, each rank."""

    seed: int
    number: int
    kind: str
    count: int
    dtype: str
    codec: str
    op: str
    root: int
    ranks: int

    @property
    def name(self) -> str:
        """The name under which ranks match it."""
        return f"{self.kind}.{self.number}"

    def sent(self, rank: int) -> Array:
        """Return a rank's send buffer: integers so small that their sums are exact in every type and codec."""
        count = self.count * (self.ranks if self.kind in SEND_TO_EACH else 1)
        below = max(2, 256 // self.ranks)
        random = np.random.default_rng((self.seed, self.number, rank))
        return random.integers(0, below, count, np.uint8).astype(self.dtype)

    def expected(self, rank: int) -> Array | None:
        """Return what a rank must receive, by definition, or None."""
        if self.kind in TO_ROOT and rank != self.root:
            return None
        parts = [self.sent(peer) for peer in ([self.root] if self.kind in FROM_ROOT else range(self.ranks))]
        if self.kind in SEND_TO_EACH:
            parts = [part[rank * self.count : (rank + 1) * self.count] for part in parts]
        if self.kind in REDUCING:
            reduced: Array = OPERATIONS[self.op].reduce(parts, axis=0, dtype=self.dtype)
            return reduced
        return np.concatenate(parts)


def draw(seed: int, collectives: int, ranks: int, most_bytes: int = 1 << 20) -> list[Collective]:
    """Draw random collectives whose longest buffers have 8 bytes per rank to `most_bytes`."""
    random = Random(seed)
    return [_drawn(random, seed, number, ranks, most_bytes) for number in range(collectives)]


def _drawn(random: Random, seed: int, number: int, ranks: int, most_bytes: int) -> Collective:
    kind, dtype = random.choice(KINDS), random.choice(DTYPES)
    blocks = ranks if kind in SEND_TO_EACH + RECEIVE_FROM_EACH else 1
    # The exponent is drawn uniformly, so that short messages are as frequent as long ones.
    nbytes = LEAST_BYTES * max(1.0, most_bytes / blocks / LEAST_BYTES) ** random.random()
    count = int(nbytes) // np.dtype(dtype).itemsize
    codec, op = random.choice(CODECS.get(dtype, ("none",))), random.choice(list(OPERATIONS))
    return Collective(seed, number, kind, count, dtype, codec, op, random.randrange(ranks), ranks)


def shuffled(calls: Sequence[Call], seed: int, rank: int) -> list[Call]:
    """Return the calls in this rank's random order."""
    return Random(f"{seed} on rank {rank}").sample(calls, len(calls))


class Call:
    """One rank's call of a collective: its buffers and the expected result."""

    def __init__(self, collective: Collective, rank: int) -> None:
        """Allocate the buffers that this rank needs."""
        self.what = collective
        self.at_root = collective.root == rank
        self._right = collective.expected(rank)
        self.receive = None if self._right is None else np.empty_like(self._right)
        self.send = None if collective.kind in FROM_ROOT and not self.at_root else collective.sent(rank)

    def reset(self) -> None:
        """Fill the receive buffer with wrong values, or on the root of a broadcast with its data."""
        if self.receive is not None:
            self.receive[:] = self.send if self.what.kind == "bcast" and self.at_root else 255

    def wrong(self) -> bool:
        """Return True if the received data is wrong."""
        return self.receive is not None and self._right is not None and not np.array_equal(self.receive, self._right)

    def start(self, comm: Any, **options: Any) -> Any:
        """Start the non-blocking method, with arguments that mpi4py and mpi_gpucomp share."""
        from mpi4py import MPI

        buffers = [self.receive] if self.what.kind == "bcast" else [self.send, self.receive]
        operation = [getattr(MPI, self.what.op)] if self.what.kind in REDUCING else []
        root = [self.what.root] if self.what.kind in FROM_ROOT + TO_ROOT else []
        return getattr(comm, f"I{self.what.kind}")(*buffers, *operation, *root, **options)


class Runner(Protocol):
    """An implementation that runs collectives."""

    def run(self, calls: Sequence[Call]) -> None:
        """Start the calls in this order, then wait for all."""

    def close(self) -> None:
        """Free resources."""


class Ours:
    """Named collectives with codecs, on mpi_gpucomp."""

    def __init__(self, world: MPI.Intracomm, slots: int, **options: Any) -> None:
        """Run at most `slots` collectives at a time."""
        from mpi_gpucomp import Communicator

        self._comm = Communicator(world, codec="none", slots=slots, **options)

    def run(self, calls: Sequence[Call]) -> None:
        """Start the calls in this order, then wait for all."""
        requests = [call.start(self._comm, name=call.what.name, codec=call.what.codec) for call in calls]
        for request in requests:
            request.Wait()

    def close(self) -> None:
        """Free the communicator."""
        self._comm.Free()


class Mpi:
    """The same collectives on native MPI, which matches them by their order."""

    def __init__(self, world: MPI.Intracomm, slots: int) -> None:
        """Use a duplicate, to separate failures from the benchmark's own messages."""
        self._comm = world.Dup()

    def run(self, calls: Sequence[Call]) -> None:
        """Start the calls in this order, then wait for all."""
        from mpi4py import MPI

        MPI.Request.Waitall([call.start(self._comm) for call in calls])

    def close(self) -> None:
        """Free the communicator."""
        self._comm.Free()


class Gloo:
    """The same collectives on gloo, through torch.distributed."""

    def __init__(self, world: MPI.Intracomm, slots: int) -> None:
        """Create a process group, through a store on a free port."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host name may have no address
        import torch

        dist: Any = torch.distributed
        torch.set_num_threads(1)
        self._dist, self._tensor = dist, torch.from_numpy
        server = dist.TCPStore("127.0.0.1", 0, world.size, True, wait_for_workers=False) if world.rank == 0 else None
        port = allgather_json(world, server.port if server else None)[0]
        store = server or dist.TCPStore("127.0.0.1", port, world.size, False)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)

    def run(self, calls: Sequence[Call]) -> None:
        """Start the calls in this order, then wait for all."""
        for work in [self._start(call) for call in calls]:
            work.wait()

    def _start(self, call: Call) -> Any:
        what, dist = call.what, self._dist
        send: Any = None if call.send is None else self._tensor(call.send)
        receive: Any = None if call.receive is None else self._tensor(call.receive)
        if what.kind in ("reduce", "allreduce"):  # in place in gloo; ranks without a receive buffer pass a copy
            receive = send.clone() if receive is None else receive.copy_(send)
        whole = receive if what.kind in RECEIVE_FROM_EACH else send
        blocks = None if whole is None else list(whole.chunk(what.ranks))
        op = getattr(dist.ReduceOp, what.op)
        starts: dict[str, Callable[[], Any]] = {
            "bcast": lambda: dist.broadcast(receive, what.root, async_op=True),
            "reduce": lambda: dist.reduce(receive, what.root, op, async_op=True),
            "allreduce": lambda: dist.all_reduce(receive, op, async_op=True),
            "allgather": lambda: dist.all_gather(blocks, send, async_op=True),
            "reduce_scatter_block": lambda: dist.reduce_scatter(receive, blocks, op, async_op=True),
            "alltoall": lambda: dist.all_to_all_single(receive, send, async_op=True),
            "gather": lambda: dist.gather(send, blocks, what.root, async_op=True),
            "scatter": lambda: dist.scatter(receive, blocks, what.root, async_op=True),
        }
        return starts[what.kind]()

    def close(self) -> None:
        """End the process group."""
        self._dist.destroy_process_group()


CANDIDATES: dict[str, Callable[..., Runner]] = {"ours": Ours, "mpi": Mpi, "gloo": Gloo}


def timed(world: MPI.Intracomm, candidate: Runner, calls: Sequence[Call]) -> float:
    """Run and verify the calls; return the slowest rank's seconds."""
    for call in calls:
        call.reset()
    world.Barrier()
    start = perf_counter()
    candidate.run(calls)
    elapsed = perf_counter() - start
    wrong = [call.what.name for call in calls if call.wrong()]
    if wrong:
        raise SystemExit(f"wrong results of {len(wrong)} of {len(calls)} collectives, first {wrong[0]}")
    return float(max(allgather_json(world, elapsed)))


def measure(world: MPI.Intracomm, options: argparse.Namespace) -> None:
    """Print a table: ours shuffled, and all candidates in order, measured alternately."""
    calls = [Call(collective, world.rank) for collective in drawn(options, world.size)]
    candidates = {name: CANDIDATES[name](world, options.slots) for name in ("ours", *options.candidates)}
    rows: list[tuple[str, str]] = [("ours", "shuffled"), *((name, "in order") for name in candidates)]
    times: dict[tuple[str, str], list[float]] = {row: [] for row in rows}
    for repetition in range(options.repeat + 1):
        for name, order in rows:
            calls_here = calls if order == "in order" else shuffled(calls, options.seed + repetition, world.rank)
            times[name, order].append(timed(world, candidates[name], calls_here))
    for candidate in candidates.values():
        candidate.close()
    if world.rank == 0:
        print(f"\n# {title(options, world.size)}: median of {options.repeat} alternating runs, all verified")
        print(f"# {'candidate':<10}{'started':<10}{'Time (ms)':>12}{'shuffled / this':>18}")
        medians = {row: median(taken[1:]) for row, taken in times.items()}  # the first run is a warm-up
        for (name, order), seconds in medians.items():
            print(f"{name:<12}{order:<10}{seconds * 1e3:12.2f}{medians['ours', 'shuffled'] / seconds:18.2f}")


def attempt(world: MPI.Intracomm, options: argparse.Namespace) -> None:
    """Run one candidate in order, then shuffled; end this rank after a time limit."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # crashes are expected and need no core dump
    faulthandler.dump_traceback_later(START_LIMIT, exit=True)
    calls = [Call(collective, world.rank) for collective in drawn(options, world.size)]
    candidate = CANDIDATES[options.candidates[0]](world, options.slots)
    in_order = timed(world, candidate, calls)
    if world.rank == 0:
        print(f"in order: {in_order:.2f} s", flush=True)
    faulthandler.dump_traceback_later(max(options.limit, 3 * in_order), exit=True)
    seconds = timed(world, candidate, shuffled(calls, options.seed, world.rank))
    if world.rank == 0:
        print(f"shuffled: {seconds:.2f} s", flush=True)
    candidate.close()
    faulthandler.cancel_dump_traceback_later()


def demonstrate(options: argparse.Namespace) -> None:
    """Run each candidate under mpirun and print the outcome."""
    print(f"# {title(options, options.ranks)}; complete in order, then shuffled:")
    outcomes = {name: outcome(name, options) for name in options.candidates or CANDIDATES}
    if not outcomes.get("ours", "right").startswith("right"):
        sys.exit(1)


def outcome(name: str, options: argparse.Namespace) -> str:
    """Run one candidate, print the outcome, and return it."""
    if name == "gloo" and find_spec("torch") is None:
        in_order, result = "not run", "torch is missing: pip install mpi_gpucomp[torch]"
    else:
        in_order, result = classify(launched(name, options))
    print(f"{name:<6}{in_order:<18}{result}", flush=True)
    return result


def launched(name: str, options: argparse.Namespace) -> subprocess.CompletedProcess[str]:
    """Run an attempt; its ranks end themselves after a time limit."""
    numbers = {key: getattr(options, key) for key in ("collectives", "seed", "slots", "most_bytes", "limit")}
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in numbers.items()]
    program = [sys.executable, "-m", "osu_bench.experiments.any_order", "attempt", f"--candidates={name}", *flags]
    command = find().command(options.ranks, program)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *_python_path()])}
    limit = 2 * START_LIMIT + 20 * options.limit
    return subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment, check=False)


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def classify(done: subprocess.CompletedProcess[str]) -> tuple[str, str]:
    """Return the outcomes of an attempt, in order and shuffled."""
    times = dict(re.findall(r"^(in order|shuffled): (.*)$", done.stdout, re.MULTILINE))
    in_order = times.get("in order", "not complete")
    if "shuffled" in times and done.returncode == 0:
        return in_order, f"right results, {times['shuffled']}"
    if complaint := COMPLAINT.search(done.stderr):
        text = " ".join(complaint[0].split())
        return in_order, text if "wrong results" in text else f"failed: {text[:120]}"
    if late := re.search(r"^Timeout \((\d+:\d+:\d+).*\)!$", done.stderr, re.MULTILINE):
        return in_order, f"hung: not complete after {late[1]}"
    return in_order, f"failed: mpirun ended with status {done.returncode}"


def title(options: argparse.Namespace, ranks: int) -> str:
    """Return the title of the run."""
    return f"{options.collectives} collectives on {ranks} ranks, {options.slots} slots, seed {options.seed}"


def drawn(options: argparse.Namespace, ranks: int) -> list[Collective]:
    """Draw the collectives of the command line."""
    return draw(options.seed, options.collectives, ranks, options.most_bytes)


def under_mpi(program: Callable[[MPI.Intracomm, argparse.Namespace], None], options: argparse.Namespace) -> None:
    """Run a rank's program; an error on one rank aborts the job with one line."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    try:
        program(world, options)
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, SystemExit) else f"{type(error).__name__}: "
        print(f"rank {world.rank}: {kind}{' '.join(str(error).split())}", file=sys.stderr, flush=True)
        sleep(0.5)  # gives mpirun time to forward the line
        world.Abort(1)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser("osu_bench any_order", (__doc__ or "").splitlines()[0], EXAMPLE)
    actions = ("measure", "demonstrate", "attempt")
    parser.add_argument(
        "action", nargs="?", choices=actions, default="measure", help="attempt: one candidate with a time limit"
    )
    parser.add_argument("--collectives", type=int, default=200, metavar="N", help="number of collectives (200)")
    parser.add_argument("--seed", type=int, default=1, help="random seed of collectives and orders")
    parser.add_argument("--slots", type=int, default=2, help="collectives of this library that run at a time")
    parser.add_argument("--repeat", type=int, default=5, help="measured runs, after one warm-up")
    parser.add_argument("--most-bytes", type=int, default=1 << 20, help="of a rank's longest buffer")
    parser.add_argument("--candidates", type=lambda text: text.split(","), default=[], help="ours, mpi, gloo")
    parser.add_argument("--ranks", type=int, default=8, help="demonstrate: number of ranks")
    parser.add_argument("--limit", type=float, default=10, help="demonstrate: time limit in seconds")
    options = parser.parse_args(arguments)
    if unknown := set(options.candidates) - set(CANDIDATES):
        parser.error(f"expected some of {', '.join(CANDIDATES)}, got {', '.join(sorted(unknown))}")
    return options


EXAMPLE = "mpirun -n 8 osu_bench any_order\nosu_bench any_order demonstrate"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, demonstrate or attempt."""
    options = parsed(argv)
    if options.action == "demonstrate":
        demonstrate(options)
    else:
        under_mpi(measure if options.action == "measure" else attempt, options)


if __name__ == "__main__":
    main()
