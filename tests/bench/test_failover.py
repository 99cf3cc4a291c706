"""Rails on a cluster of two networks: links that are cut in the middle of things, by cable and silently, and healed."""

from __future__ import annotations

import importlib.util
import random
import time
from collections.abc import Iterator

import pytest
from cluster_machine import new_name, skip_unless_possible

from osu_bench.cluster import Cluster
from osu_bench.experiments.failover import Cut, Job, Operation, cut_and_heal, outcome, progress_limit

HOSTS, RAILS = 3, "eth0,eth1"
TIMEOUT = 0.4


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    skip_unless_possible()
    with Cluster.up(HOSTS, "1gbit", 2, name=new_name()) as made:
        yield made


@pytest.fixture(autouse=True)
def whole(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").heal()


def start(
    cluster: Cluster, operation: str, nbytes: int, limit: float = 30.0, rails: str = RAILS, wire: str = "tcp"
) -> Job:
    return Job(cluster, operation, nbytes, rails, TIMEOUT, limit, wire=wire)


def finish(ranks: Job) -> dict[int, list[list[object]]]:
    """Let the ranks stop; return the paths that each has lost."""
    assert ranks.finish() == 0, ranks.errors
    assert all(operation.wrong == 0 for operation in ranks.operations)
    return {report["rank"]: report["failovers"] for report in ranks.reports}


needs_ucxx = pytest.mark.skipif(
    importlib.util.find_spec("ucxx") is None, reason="no ucxx: pip install mpi_gpucomp[ucx]"
)


@pytest.mark.parametrize("wire", ["tcp", pytest.param("ucx", marks=needs_ucxx)])
@pytest.mark.parametrize(("operation", "seed"), [("bcast", 1), ("allreduce", 2), ("send", 3)])
def test_cuts_of_every_kind_are_overcome(cluster: Cluster, operation: str, seed: int, wire: str) -> None:
    draw = random.Random(seed)
    with start(cluster, operation, 8_000_000, wire=wire) as ranks:
        assert ranks.wait(2), ranks.errors
        for how in ("down", "silent", 1.0):
            host = draw.randrange(2)
            assert cut_and_heal(cluster, ranks, how, draw, host) is not None, (how, ranks.errors)
        lost = finish(ranks)
    between = [one for one in lost[0] if one[0] == 1]  # of the first rank, to the second
    assert len(between) >= 2 and all(rail == 0 for _, rail, *_ in between)
    assert all(seconds is not None for *_, seconds in between), "they had agreed where to go on"


def test_all_paths_may_go_if_one_comes_back(cluster: Cluster) -> None:
    with start(cluster, "allreduce", 8_000_000) as ranks:
        assert ranks.wait(2), ranks.errors
        cluster.cut(1, 0, "silent")
        cluster.cut(1, 1, "down")
        time.sleep(3 * TIMEOUT)
        before = len(ranks.operations)
        cluster.heal(1, 1)
        assert ranks.wait(before + 3), ranks.errors
        cluster.heal(1, 0)
        assert ranks.more(2)
        lost = finish(ranks)
    assert {rail for _, rail, *_ in lost[1]} == {0, 1}


def test_every_rank_hears_when_no_path_comes_back(cluster: Cluster) -> None:
    with start(cluster, "bcast", 8_000_000, limit=1.5) as ranks:
        assert ranks.wait(2), ranks.errors
        for rail in (0, 1):
            cluster.cut(2, rail, "silent")
        assert not ranks.more(3, 60)
        ranks.end()
    errors = {report["rank"]: report["error"] for report in ranks.reports}
    assert errors.keys() == {0, 1, 2}, ranks.errors
    for rank, error in errors.items():
        assert error.startswith(f"RankFailedError: rank {rank}: rails: expected all ranks reachable, got no path from ")
        assert "2: all paths down for" in error or "from rank 2 to" in error
        assert error.endswith("Check the network and that rank. This communicator cannot be used any more.")


def test_a_long_message_goes_on_over_the_other_rail(cluster: Cluster) -> None:
    with start(cluster, "send", 60_000_000, rails="eth0+eth1") as ranks:
        assert ranks.wait(1), ranks.errors
        for rail in (0, 1):
            time.sleep(0.2)
            cluster.cut(0, rail, "silent")
            assert ranks.more(1), ranks.errors
            cluster.heal(0, rail)
            assert ranks.more(1), ranks.errors
        lost = finish(ranks)
    assert {rail for _, rail, *_ in lost[0]} == {0, 1}


def test_what_a_cut_has_cost() -> None:
    times = [(0.0, 1.0), (1.0, 2.0), (2.0, 4.5), (4.5, 5.5), (5.5, 6.5), (6.5, 7.5), (7.5, 8.5)]
    operations = [Operation(start, end, end, 0) for start, end in times]
    found = outcome("silent", [Cut("silent", 2.9, 6.6)], operations)
    assert found == ("silent", 1, 0, 1.0, [1.5], 1.0) and found.share == 1.0
    assert outcome(1.0, [Cut(1.0, 2.9, 6.6)], operations).how == "loss 1 %"


def test_long_operations_have_a_longer_limit() -> None:
    assert progress_limit(1 << 24, 1e9) == progress_limit(1 << 24, None) == 60.0
    assert progress_limit(1 << 30, 1e9) > 10 * (1 << 30) * 8 / 1e9
