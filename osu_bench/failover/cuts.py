"""Cuts at random moments, and what each of them cost."""

from __future__ import annotations

import random
import time
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from osu_bench.cluster.cluster import Cluster
    from osu_bench.failover.watching import Turn, Watched

__all__ = ["Cut", "Outcome", "cut_and_heal", "measure", "outcome", "patience"]

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
