"""The command `failover`: what a cut costs on rails, and what becomes of an MPI without them."""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi_gpucomp.cli.output import table
from osu_bench.arguments import CommandParser, message_size, names
from osu_bench.cluster import rootless
from osu_bench.cluster.network import parse_rate

if TYPE_CHECKING:
    import argparse
    from types import TracebackType

    from osu_bench.cluster.cluster import Cluster

__all__ = ["PLAIN", "Cut", "Outcome", "Turn", "Watched", "cut_and_heal", "main", "measure", "outcome", "patience"]


# Cuts at random moments, and what each of them cost.

BEFORE, MEANWHILE, BETWEEN = 4, 3, 2
"""Whole turns before the first cut, while the link is cut, and after it is healed."""
PATIENCE, SLOWEST = 60.0, 4
"""Seconds in which the ranks must go on; or so many times what their turns would take on wires that carry a message
twice, as an all-reduce does."""


class Cut(NamedTuple):
    """When a link was cut, and when it was healed."""

    how: str | float
    at: float
    healed: float


class Outcome(NamedTuple):
    """What the cuts of one kind have cost."""

    how: str
    cuts: int
    wrong: int
    """Turns that did not give what they should."""
    undisturbed: float
    """Seconds of a turn without a cut."""
    lost: list[float]
    """For each cut, the seconds by which the turns that it fell into took longer."""
    after: float
    """Seconds of a turn while the link is cut, once that has been overcome."""

    @property
    def share(self) -> float:
        """Return the bandwidth while the link is cut, as a share of what it was."""
        return self.undisturbed / self.after if self.after else 0.0


def patience(nbytes: int, rate: float | None) -> float:
    """Return the seconds in which ranks must go on, with messages so long at so many bits a second."""
    turn = 2 * nbytes * 8 / rate if rate else 0.0
    return max(PATIENCE, SLOWEST * BEFORE * turn)


def cut_and_heal(
    cluster: Cluster, ranks: Watched, how: str | float, draw: random.Random, host: int, patience: float = PATIENCE
) -> Cut | None:
    """Cut a link of the first rail at a random moment, heal it when the ranks have gone on, and wait for all paths.

    Return None if the ranks do not go on within `patience` seconds.
    """
    pause = draw.uniform(0, ranks.turns[-1].seconds)
    time.sleep(pause)
    at = time.monotonic()
    cluster.cut(host, 0, how)
    on = ranks.more(MEANWHILE, patience)
    healed = time.monotonic()
    cluster.heal(host, 0)
    back = on and ranks.more(1, patience) and ranks.whole(patience) and ranks.more(BETWEEN, patience)
    return Cut(how, at, healed) if back else None


def measure(
    cluster: Cluster,
    ranks: Watched,
    kinds: list[str | float],
    cuts: int,
    seed: int,
    hosts: list[int],
    patience: float = PATIENCE,
) -> list[Cut]:
    """Make so many cuts, of all kinds by turns; fewer if the ranks do not go on."""
    draw = random.Random(seed)
    made: list[Cut] = []
    if ranks.wait(BEFORE, patience):
        for number in range(cuts):
            cut = cut_and_heal(cluster, ranks, kinds[number % len(kinds)], draw, draw.choice(hosts), patience)
            if cut is None:
                break
            made.append(cut)
    return made


def outcome(how: str | float, cuts: list[Cut], turns: list[Turn]) -> Outcome:
    """Put together what the cuts of one kind have cost."""
    own = [cut for cut in cuts if cut.how == how]
    usual = median(turn.seconds for turn in turns if not any(_touches(turn, cut) for cut in cuts))
    hit = [[turn for turn in turns if turn.start <= cut.at + usual and turn.all >= cut.at] for cut in own]
    lost = [sum(turn.seconds - usual for turn in some) for some in hit]
    settled = [turn.seconds for cut in own for turn in turns if _is_within(turn, cut, usual)]
    name = f"loss {how:g} %" if isinstance(how, float) else how
    wrong = sum(turn.wrong > 0 for turn in turns)
    return Outcome(name, len(own), wrong, usual, lost, median(settled) if settled else 0.0)


def _touches(turn: Turn, cut: Cut) -> bool:
    return turn.start < cut.healed and turn.all > cut.at


def _is_within(turn: Turn, cut: Cut, usual: float) -> bool:
    """Say whether a whole turn took place while a link was cut, and not the first."""
    return turn.start > cut.at + usual / 2 and turn.all < cut.healed


# Ranks that do one operation in a loop, as seen from outside: their turns, and what they say in the end.

PLAIN = "plain"
"""In place of devices: mpi4py's own calls."""
NAP = 0.005


class Turn(NamedTuple):
    """One operation, by the machine's clock."""

    start: float
    end: float
    """When the first rank was through with it."""
    all: float
    """When all ranks had told each other so."""
    wrong: int
    missing: int = 0
    """Paths that were not there or not used again yet, as seen from all ranks."""

    @property
    def seconds(self) -> float:
        """How long it took until all were through."""
        return self.all - self.start


class Watched:
    """Ranks at work on a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        operation: str,
        nbytes: int,
        devices: str,
        timeout: float = 0.5,
        limit: float = 30.0,
        *,
        wire: str = "tcp",
        mpi: str = "openmpi",
        mpich: str | Path | None = None,
    ) -> None:
        """Start them; devices are those of rails, or PLAIN."""
        self.turns: list[Turn] = []
        self.said: list[dict[str, Any]] = []
        """What ranks have said besides: errors, and how their paths fared."""
        self._folder = tempfile.TemporaryDirectory()
        self._stop = Path(self._folder.name) / "stop"
        words = (operation, str(nbytes), devices, str(timeout), str(limit), wire, str(self._stop))
        program = [sys.executable, "-m", "osu_bench.experiments.failover_ranks", *words]
        self.running = cluster.start(program, mpi, capture=True, mpich=mpich)
        self.errors: list[str] = []
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self.running.process.stdout is not None
        for line in self.running.process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                self.errors.append(line)
                continue
            if "turn" in said:
                self.turns.append(Turn(said["start"], said["end"], said["all"], said["wrong"], said["missing"]))
            else:
                self.said.append(said)

    def _read_errors(self) -> None:
        assert self.running.process.stderr is not None
        self.errors += self.running.process.stderr

    def wait(self, turns: int, seconds: float = 60.0) -> bool:
        """Wait until so many turns are done in all; say whether they are."""
        until = time.monotonic() + seconds
        while len(self.turns) < turns and time.monotonic() < until and self.running.poll() is None:
            time.sleep(NAP)
        return len(self.turns) >= turns

    def more(self, turns: int, seconds: float = 60.0) -> bool:
        """Wait for so many more turns that begin from now on."""
        now, until = time.monotonic(), time.monotonic() + seconds
        while time.monotonic() < until and self.running.poll() is None:
            if sum(turn.start > now for turn in self.turns[-turns - 1 :]) >= turns:
                return True
            time.sleep(NAP)
        return False

    def whole(self, seconds: float = 60.0) -> bool:
        """Wait until all paths are there."""
        until = time.monotonic() + seconds
        while self.turns[-1].missing and time.monotonic() < until and self.running.poll() is None:
            time.sleep(NAP)
        return not self.turns[-1].missing

    def finish(self, seconds: float = 60.0) -> int | None:
        """Let the ranks stop, and return their exit code; None if they do not."""
        self._stop.touch()
        until = time.monotonic() + seconds
        while self.running.poll() is None and time.monotonic() < until:
            time.sleep(NAP)
        code = self.running.poll()
        self.end()
        return code

    def end(self) -> None:
        """End them, whatever they do."""
        self.running.end()
        for thread in self._threads:
            thread.join(10)
        self._folder.cleanup()

    def __enter__(self) -> Watched:
        """Use them for the length of a `with`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what is left of them."""
        self.end()


WIRES = "tcp", "ucx", "auto"
"""As `Rails` has them; they are not asked for here, because that would start MPI."""
HEADER = ("operation", "cut", "cuts", "wrong", "turn ms", "lost ms", "most lost ms", "bandwidth after")
STILL_SECONDS = 20.0
"""How long a plain MPI is watched after a cut."""


EXAMPLE = """\
osu_bench failover --operations bcast --cuts 6"""


def main(argv: Sequence[str] | None = None) -> int:
    """Cut links during operations on rails, and print what each cut cost."""
    parser = CommandParser(
        "osu_bench failover", "Cut links during operations on rails, and measure what each cut costs.", EXAMPLE
    )
    parser.add_argument("--hosts", type=int, default=2, help="of the cluster (2)")
    parser.add_argument("--rate", default="1gbit", help="of each link (1gbit)")
    parser.add_argument("--rails", default="eth0,eth1", help="devices (eth0,eth1: the second where the first is dead)")
    parser.add_argument("--wire", choices=WIRES, default="tcp", help="what rails are made of (tcp)")
    parser.add_argument("--operations", type=names, default=["bcast", "allreduce", "send"], metavar="A,B")
    parser.add_argument(
        "--how", type=names, default=["down", "silent", "1"], metavar="A,B", help="down, silent, percent"
    )
    parser.add_argument("--cuts", type=int, default=12, help="for each operation (12)")
    parser.add_argument("-m", "--message-size", type=message_size, default=(1 << 26, 1 << 26), metavar="BYTES")
    parser.add_argument("--timeout", type=float, default=0.5, help="of detection, in seconds (0.5)")
    parser.add_argument("--patience", type=float, help="seconds in which ranks must go on (60, or more for long ones)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="cut under plain MPI too, once for each kind")
    parser.add_argument("--mpich", metavar="PREFIX", help="where an MPICH is, for --plain")
    parser.add_argument("--name", default="failover", help="of the cluster")
    words = list(sys.argv[2:] if argv is None else argv)
    args = parser.parse_args(words)
    rootless.enter("failover", *words)
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    from osu_bench.cluster.cluster import Cluster

    args.patience = args.patience or patience(args.message_size[1], parse_rate(args.rate))
    kinds: list[str | float] = [float(how) if how[0].isdigit() else how for how in args.how]
    code = 0
    with Cluster.up(args.hosts, args.rate, 2, name=args.name) as cluster:
        rows = []
        for operation in args.operations:
            found, fine = _on_rails(cluster, args, operation, kinds)
            code |= not fine
            rows += [_row(operation, one) for one in found]
        print(
            f"\nRails {args.rails} ({args.wire}), {args.hosts} hosts, {args.rate}, {args.message_size[1]} bytes, ",
            end="",
        )
        print(f"timeout {args.timeout:g} s, seed {args.seed}\n\n{table(HEADER, rows)}", flush=True)
        for mpi in ["openmpi", *(["mpich"] if args.mpich else [])] if args.plain else []:
            for operation in args.operations:
                for how in kinds:
                    print(
                        f"plain {mpi}, {operation}, {how}: {_plainly(cluster, args, mpi, operation, how)}", flush=True
                    )
    return code


def _on_rails(
    cluster: Cluster, args: argparse.Namespace, operation: str, kinds: list[str | float]
) -> tuple[list[Outcome], bool]:
    hosts = [0, 1] if operation == "send" else list(range(args.hosts))
    with Watched(cluster, operation, args.message_size[1], args.rails, args.timeout, wire=args.wire) as ranks:
        cuts = measure(cluster, ranks, kinds, args.cuts, args.seed, hosts, args.patience)
        code = ranks.finish(args.patience)
    complete = len(cuts) == args.cuts and code == 0 and not any(turn.wrong for turn in ranks.turns)
    if not complete:
        print(
            f"{operation}: exit code {code} after {len(cuts)} cuts", *ranks.errors[-20:], *ranks.said, file=sys.stderr
        )
    found = _outcomes(kinds, cuts, ranks)
    return found, complete


def _outcomes(kinds: list[str | float], cuts: list[Cut], ranks: Watched) -> list[Outcome]:
    return [outcome(how, cuts, ranks.turns) for how in kinds if any(cut.how == how for cut in cuts)]


def _row(operation: str, one: Outcome) -> tuple[str, ...]:
    lost = [f"{1e3 * seconds:.0f}" for seconds in (median(one.lost), max(one.lost))]
    return (
        operation,
        one.how,
        str(one.cuts),
        str(one.wrong),
        f"{1e3 * one.undisturbed:.0f}",
        *lost,
        f"{one.share:.0%}",
    )


def _plainly(cluster: Cluster, args: argparse.Namespace, mpi: str, operation: str, how: str | float) -> str:
    """Cut once under a plain MPI, and say what becomes of it."""
    mpich = args.mpich if mpi == "mpich" else None
    with Watched(cluster, operation, args.message_size[1], PLAIN, mpi=mpi, mpich=mpich) as ranks:
        if not ranks.wait(3, args.patience):
            return "it did not begin"
        usual = min(turn.seconds for turn in ranks.turns)
        cluster.cut(1, 0, how)
        time.sleep(usual)
        on = ranks.more(2, STILL_SECONDS)
        code = ranks.running.poll()
        cluster.heal()
        if code is not None:
            return f"the job ended with exit code {code}"
        again = ranks.more(2, STILL_SECONDS)
        if on:
            return f"went on, slowest turn {max(turn.seconds for turn in ranks.turns):.2f} s (usually {usual:.2f} s)"
        return (
            f"stood still for {STILL_SECONDS:.0f} s, {'went on' if again else 'stood still'} when the link was healed"
        )
