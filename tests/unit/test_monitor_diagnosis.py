"""Diagnoses from the summaries of all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from mpi_gpucomp.monitor.diagnosis import Diagnosis, LinkSummary, RankSummary, diagnose, diagnose_hang, diagnose_silence


def chain(**links: tuple[float, bool]) -> dict[int, RankSummary]:
    """Return four ranks on four hosts in the middle of a broadcast along a chain, at 100 MB/s."""
    ranks = {rank: RankSummary(rank, f"h{rank}", calls=20) for rank in range(4)}
    for rank in range(3):
        speed, slow = links.get(f"from_{rank}", (100e6, False))
        ranks[rank].links.append(LinkSummary(rank + 1, 0, speed, 100e6, slow, 0.98))
        ranks[rank + 1].recv_wait[rank] = 0.95
    return ranks


def changed(ranks: dict[int, RankSummary], rank: int, **values: Any) -> dict[int, RankSummary]:
    for name, value in values.items():
        setattr(ranks[rank], name, value)
    return ranks


def test_healthy_ranks() -> None:
    assert diagnose(chain()) is None


def test_slow_link_between_ready_ranks() -> None:
    assert diagnose(chain(from_1=(25e6, True))) == Diagnosis(
        "slow link", (1, 2), "slow link: from rank 1 (h1) to rank 2 (h2), 25 MB/s instead of 100 MB/s"
    )


def test_link_whose_receiver_is_blocked_is_not_slow() -> None:
    ranks = chain(from_0=(25e6, True), from_1=(25e6, True))
    ranks[1].recv_wait[0] = 0.1  # backpressure: rank 1 cannot forward to rank 2
    found = diagnose(ranks)
    assert found is not None and found[:2] == ("slow link", (1, 2))


def test_two_slow_links_at_one_rank_are_a_slow_rank() -> None:
    assert diagnose(chain(from_1=(25e6, True), from_2=(20e6, True))) == Diagnosis(
        "slow rank",
        (2,),
        "slow rank: all links at rank 2 (h2) are slow: 1 to 2 at 25 MB/s instead of 100 MB/s"
        " and 2 to 3 at 20 MB/s instead of 100 MB/s",
    )


def test_busy_host_precedes_the_links_to_it() -> None:
    ranks = changed(chain(from_1=(25e6, True)), 2, delayed=0.62)
    text = "slow rank: rank 2 (h2) waits for a processor 62% of the time (other hosts 0%)"
    assert diagnose(ranks) == Diagnosis("slow rank", (2,), text, times=4)


@pytest.mark.parametrize(("share", "expected"), [(0.75, False), (0.9, True)])
def test_host_with_far_less_cpu_time_than_other_busy_hosts(share: float, expected: bool) -> None:
    ranks = chain()
    for rank, summary in ranks.items():
        summary.delayed = share if rank == 2 else 0.5
    found = diagnose(ranks)
    assert (found is not None and found[:2] == ("slow rank", (2,))) == expected


def test_ranks_of_one_busy_host_are_not_told_apart() -> None:
    ranks = chain(from_0=(52e6, False), from_1=(45e6, True), from_2=(55e6, False))
    for rank, share in enumerate((0.2, 0.3, 0.7, 0.2)):
        ranks[rank].host, ranks[rank].delayed = "one", share
    assert diagnose(ranks) is None


def test_links_that_are_slow_together_on_a_busy_machine() -> None:
    ranks = chain(from_0=(45e6, True), from_1=(40e6, True), from_2=(42e6, True))
    for summary in ranks.values():
        summary.delayed = 0.4
    assert diagnose(ranks) is None


def test_rank_that_is_stopped_repeatedly() -> None:
    ranks = changed(chain(from_1=(25e6, True)), 2, stalled=0.7)
    assert diagnose(ranks) == Diagnosis(
        "slow rank", (2,), "slow rank: rank 2 (h2) is stalled 70% of the time (others 0%)"
    )


def test_rank_with_a_slow_codec() -> None:
    assert diagnose(changed(chain(), 0, codec=0.3)) == Diagnosis(
        "slow rank", (0,), "slow rank: rank 0 (h0) encodes and decodes at 30% of its usual rate"
    )


def test_rank_that_joins_late() -> None:
    ranks = changed(chain(), 3, outside=0.6)
    ranks[0].late, ranks[2].late = {3: 0.5}, {3: 0.45}
    assert diagnose(ranks) == Diagnosis(
        "imbalance",
        (3,),
        "imbalance: rank 3 (h3) joins calls late, others wait for it 50% of the time;"
        " it is outside of calls 60% of the time, the others 0%",
    )


def test_rank_that_the_data_reach_last_is_not_late() -> None:
    ranks = changed(chain(), 3, outside=0.02)
    ranks[0].late = {3: 0.5}
    assert diagnose(ranks) is None


@pytest.mark.parametrize(
    ("begun", "absent", "expected", "text"),
    [
        ((7, 7, 6, 7), (), (2,), "hang: rank 2 (h2) has begun 6 of 7 calls, others wait in broadcast (call 7),"),
        ((7, 7, 7, 7), (2,), (2,), "hang: rank 2 does not answer,"),
        ((7, 7, 7, 7), (), (), "hang: all ranks have joined the same calls,"),
    ],
)
def test_hang_names_the_rank_that_has_begun_fewer_calls(
    begun: tuple[int, ...], absent: tuple[int, ...], expected: tuple[int, ...], text: str
) -> None:
    ranks = {
        rank: RankSummary(rank, f"h{rank}", begun={"": count}, waits=["broadcast (call 7)"] if count == 7 else [])
        for rank, count in enumerate(begun)
        if rank not in absent
    }
    found = diagnose_hang(ranks, (0, 1, 2, 3), 12.3)
    assert found.ranks == expected
    assert found.text.startswith(f"{text} no progress for 12 s")


def test_codec_is_not_slow_under_cpu_pressure() -> None:
    ranks = changed(chain(), 1, codec=0.4)
    found = diagnose(ranks)
    assert found is not None and found[:2] == ("slow rank", (1,))
    assert diagnose(changed(ranks, 1, cpu_pressure=True)) is None


def test_one_silent_rank_is_slow() -> None:
    ranks = chain()
    del ranks[2]
    found = diagnose_silence(ranks, (0, 1, 2, 3), 1.0)
    assert found is not None and found[:2] == ("slow rank", (2,)) and found.times == 3
    for summary in ranks.values():
        summary.outside = 0.9
    assert diagnose_silence(ranks, (0, 1, 2, 3), 1.0) is None, "no rank waits for it"
    ranks = chain()
    del ranks[2], ranks[3]
    assert diagnose_silence(ranks, (0, 1, 2, 3), 1.0) is None


def busy(ranks: dict[int, RankSummary], delayed: float = 0.6) -> dict[int, RankSummary]:
    """Let all ranks wait for a processor for much of the time."""
    for summary in ranks.values():
        summary.delayed, summary.cpu_pressure = delayed, True
    return ranks


def test_link_between_busy_ranks_needs_more_evidence() -> None:
    found, quiet = diagnose(busy(chain(from_1=(25e6, True)))), diagnose(chain(from_1=(25e6, True)))
    assert found is not None and quiet is not None and found[:3] == quiet[:3]
    assert (found.times, quiet.times) == (6, 2)


def test_imbalance_of_a_busy_rank_needs_more_evidence() -> None:
    ranks = changed(chain(), 3, outside=0.6)
    ranks[0].late = {3: 0.5}
    assert (diagnose(ranks) or Diagnosis("", (), "", 0)).times == 2
    assert (diagnose(busy(ranks)) or Diagnosis("", (), "", 0)).times == 6


def test_stuck_link_between_busy_ranks_is_no_evidence() -> None:
    assert diagnose(busy(chain(from_1=(0.0, True)))) is None
    assert diagnose(chain(from_1=(0.0, True))) is not None


def test_link_is_compared_with_all_others_also_slow_ones() -> None:
    ranks = busy(chain(from_0=(70e6, False), from_1=(54e6, False), from_2=(35.6e6, True)))
    ranks[3].links.append(LinkSummary(0, 0, 37.7e6, 100e6, True, 0.75))
    assert diagnose(ranks) is None


def test_burst_on_other_links_is_no_evidence() -> None:
    ranks = busy(chain(from_0=(150e6, False), from_1=(69e6, True), from_2=(150e6, False)))
    assert diagnose(ranks) is None


def test_summary_and_diagnosis_survive_the_wire() -> None:
    summary = chain(from_1=(25e6, True))[2]
    summary.begun, summary.waits, summary.late = {"": 3, "x": 1}, ["broadcast (call 3)"], {1: 0.5}
    assert RankSummary.from_json(summary.to_json()) == summary
    diagnosis = Diagnosis("slow link", (1, 2), "slow link", 6, 77)
    assert Diagnosis.from_json(diagnosis.to_json()) == diagnosis


@pytest.mark.parametrize("text", ["", "7", "[]", "{}", '{"rank": 1, "x": 2}', '{"rank": 1e999}', '{"rank": [1]}'])
def test_malformed_messages_are_value_errors(text: str) -> None:
    for kind in (RankSummary, Diagnosis):
        with pytest.raises(ValueError, match=r"."):
            kind.from_json(text)
