"""Who is blamed: told apart by what all ranks tell of the same second."""

from __future__ import annotations

from typing import Any

import pytest

from mpi_gpucomp.monitor.diagnosis import Diagnosis, Outgoing, RankSummary, diagnose, diagnose_hang, diagnose_silence


def chain(**links: tuple[float, bool]) -> dict[int, RankSummary]:
    """Return four ranks on four hosts in the middle of a broadcast along a chain, at 100 MB/s."""
    told = {rank: RankSummary(rank, f"h{rank}", calls=20) for rank in range(4)}
    for rank in range(3):
        speed, slow = links.get(f"from_{rank}", (100e6, False))
        told[rank].links.append(Outgoing(rank + 1, 0, speed, 100e6, slow, 0.98))
        told[rank + 1].starved[rank] = 0.95
    return told


def changed(told: dict[int, RankSummary], rank: int, **values: Any) -> dict[int, RankSummary]:
    for name, value in values.items():
        setattr(told[rank], name, value)
    return told


def test_nobody_is_blamed_when_all_is_well() -> None:
    assert diagnose(chain()) is None


def test_a_slow_link_between_two_that_are_ready() -> None:
    assert diagnose(chain(from_1=(25e6, True))) == Diagnosis(
        "slow link", (1, 2), "slow link: from rank 1 (h1) to rank 2 (h2), 25 MB/s instead of 100 MB/s"
    )


def test_a_link_whose_receiver_cannot_take_more_is_not_blamed() -> None:
    told = chain(from_0=(25e6, True), from_1=(25e6, True))
    told[1].starved[0] = 0.1  # rank 1 has no room left: it waits for rank 2 to take what it has
    verdict = diagnose(told)
    assert verdict is not None and verdict[:2] == ("slow link", (1, 2))


def test_two_slow_links_at_one_rank_are_that_rank() -> None:
    assert diagnose(chain(from_1=(25e6, True), from_2=(20e6, True))) == Diagnosis(
        "slow rank",
        (2,),
        "slow rank: all links at rank 2 (h2) are slow: 1 to 2 at 25 MB/s instead of 100 MB/s"
        " and 2 to 3 at 20 MB/s instead of 100 MB/s",
    )


def test_a_busy_host_is_blamed_before_the_links_to_it() -> None:
    told = changed(chain(from_1=(25e6, True)), 2, delayed=0.62)
    text = "slow rank: rank 2 (h2) waits for a processor 62% of the time (other hosts 0%)"
    assert diagnose(told) == Diagnosis("slow rank", (2,), text, times=4)


@pytest.mark.parametrize(("share", "found"), [(0.75, False), (0.9, True)])
def test_a_host_with_far_less_left_is_blamed_though_all_are_busy(share: float, found: bool) -> None:
    told = chain()
    for rank, digest in told.items():
        digest.delayed = share if rank == 2 else 0.5
    verdict = diagnose(told)
    assert (verdict is not None and verdict[:2] == ("slow rank", (2,))) == found


def test_ranks_that_share_a_busy_host_are_not_blamed() -> None:
    told = chain(from_0=(52e6, False), from_1=(45e6, True), from_2=(55e6, False))
    for rank, share in enumerate((0.2, 0.3, 0.7, 0.2)):
        told[rank].host, told[rank].delayed = "one", share
    assert diagnose(told) is None


def test_all_links_that_are_slow_together_on_a_busy_machine_are_not_blamed() -> None:
    told = chain(from_0=(45e6, True), from_1=(40e6, True), from_2=(42e6, True))
    for digest in told.values():
        digest.delayed = 0.4
    assert diagnose(told) is None


def test_a_rank_that_is_stopped_again_and_again() -> None:
    told = changed(chain(from_1=(25e6, True)), 2, still=0.7)
    assert diagnose(told) == Diagnosis(
        "slow rank", (2,), "slow rank: rank 2 (h2) stands still 70% of the time (others 0%)"
    )


def test_a_rank_that_codes_slowly() -> None:
    assert diagnose(changed(chain(), 0, coding=0.3)) == Diagnosis(
        "slow rank", (0,), "slow rank: rank 0 (h0) encodes and decodes at 30% of its usual speed"
    )


def test_a_rank_that_comes_late_because_it_is_elsewhere() -> None:
    told = changed(chain(), 3, outside=0.6)
    told[0].late, told[2].late = {3: 0.5}, {3: 0.45}
    assert diagnose(told) == Diagnosis(
        "imbalance",
        (3,),
        "imbalance: rank 3 (h3) comes late to calls, others wait for it 50% of the time;"
        " it is outside of calls 60% of the time, the others 0%",
    )


def test_a_rank_that_is_last_because_the_data_reach_it_last_is_not_blamed() -> None:
    told = changed(chain(), 3, outside=0.02)
    told[0].late = {3: 0.5}
    assert diagnose(told) is None


@pytest.mark.parametrize(
    ("begun", "absent", "ranks", "text"),
    [
        ((7, 7, 6, 7), (), (2,), "hang: rank 2 (h2) has begun 6 of 7 calls, others wait in broadcast (call 7), and"),
        ((7, 7, 7, 7), (2,), (2,), "hang: rank 2 does not answer, and"),
        ((7, 7, 7, 7), (), (), "hang: all ranks have joined the same calls, and"),
    ],
)
def test_a_hang_is_behind_who_has_not_come_as_far(
    begun: tuple[int, ...], absent: tuple[int, ...], ranks: tuple[int, ...], text: str
) -> None:
    told = {
        rank: RankSummary(rank, f"h{rank}", begun={"": count}, waits=["broadcast (call 7)"] if count == 7 else [])
        for rank, count in enumerate(begun)
        if rank not in absent
    }
    verdict = diagnose_hang(told, (0, 1, 2, 3), 12.3)
    assert verdict.ranks == ranks
    assert verdict.text.startswith(f"{text} nothing has moved for 12 s")


def test_a_coder_is_not_blamed_where_the_machine_has_no_processor_for_it() -> None:
    told = changed(chain(), 1, coding=0.4)
    verdict = diagnose(told)
    assert verdict is not None and verdict[:2] == ("slow rank", (1,))
    assert diagnose(changed(told, 1, pressed=True)) is None


def test_one_that_does_not_come_to_answer_is_slow_and_several_are_nobody() -> None:
    told = chain()
    del told[2]
    verdict = diagnose_silence(told, (0, 1, 2, 3), 1.0)
    assert verdict is not None and verdict[:2] == ("slow rank", (2,)) and verdict.times == 3
    for digest in told.values():
        digest.outside = 0.9
    assert diagnose_silence(told, (0, 1, 2, 3), 1.0) is None, "nobody waits for it"
    told = chain()
    del told[2], told[3]
    assert diagnose_silence(told, (0, 1, 2, 3), 1.0) is None
