"""How clusters come and go: interrupted, killed, left behind, in use by others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from cluster_machine import ENVIRONMENT, new_name, skip_unless_possible

from osu_bench.cluster import Cluster, ClusterError
from osu_bench.cluster.plan import namespaces_of
from osu_bench.cluster.processes import end, process, within
from osu_bench.cluster.state import folder

OWNER = """
import subprocess, sys, time
from osu_bench.cluster import Cluster
with Cluster.up(2, name=sys.argv[1]) as cluster:
    inside = subprocess.Popen([*cluster.inside(1), "sh", "-c", "echo $$; exec sleep 100"])
    time.sleep(100)
"""


@pytest.fixture
def name() -> Iterator[str]:
    skip_unless_possible()
    chosen = new_name()
    yield chosen
    assert namespaces_of(chosen) == [] and not folder(chosen).exists()


@pytest.fixture
def owner(name: str) -> Iterator[subprocess.Popen[str]]:
    """Return another process that has made a cluster of this name."""
    command = [sys.executable, "-c", OWNER, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as running:
        yield running
        running.kill()


def sleeper(owner: subprocess.Popen[str]) -> int:
    """Return the process that the owner of a cluster has started inside, once it is there to say so."""
    assert owner.stdout is not None
    return int(owner.stdout.readline())


def test_a_cluster_goes_after_an_exception(name: str) -> None:
    with pytest.raises(KeyboardInterrupt), Cluster.up(2, name=name) as cluster:
        assert namespaces_of(name) == [f"{name}-h0", f"{name}-h1", f"{name}-switch"]
        raise KeyboardInterrupt
    cluster.down()


def ends(number: int) -> bool:
    """Return True if a process that was killed is gone, as it should be in a moment."""
    for _ in range(100):
        if process(number) is None:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_cluster_goes_when_its_owner_is_told_to_end(
    name: str, owner: subprocess.Popen[str], number: signal.Signals
) -> None:
    inside = sleeper(owner)
    owner.send_signal(number)
    assert owner.wait(30) == (-signal.SIGINT if number == signal.SIGINT else 128 + number)
    assert ends(inside) and namespaces_of(name) == []


def test_signals_are_handled_as_before_afterwards(name: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Cluster.up(1, name=name):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_cluster_that_cannot_be_finished_is_removed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osu_bench.cluster.network.CONGESTION_CONTROL", "nosuch")
    with pytest.raises(ClusterError, match="congctl nosuch"):
        Cluster.up(2, name=name)
    assert namespaces_of(name) == []


def test_what_a_killed_owner_has_left_is_removed(
    name: str, owner: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    inside = sleeper(owner)
    bystander = subprocess.Popen(["sleep", "100"])
    owner.kill()
    owner.wait()
    assert [pid for pid, _ in within(namespaces_of(name))] == [inside]
    with Cluster.up(1, name=name):
        assert process(inside) is None and bystander.poll() is None
        assert namespaces_of(name) == [f"{name}-h0", f"{name}-switch"]
    shown = f"cluster {name}: removed the remains of an earlier one; namespaces: 3, processes: 1\n"
    assert capsys.readouterr().err == shown
    bystander.kill()
    bystander.wait()


def test_a_cluster_in_use_is_replaced_only_when_asked(name: str, owner: subprocess.Popen[str]) -> None:
    inside = sleeper(owner)
    with pytest.raises(ClusterError) as error:
        Cluster.up(1, name=name)
    assert str(error.value) == (
        f"cluster {name}: expected a cluster that no process uses, got one in use by process {owner.pid}. "
        "Wait, choose another --name, or replace it with --replace."
    )
    assert process(inside) is not None
    with Cluster.up(1, name=name, replace=True):
        assert process(inside) is None
        owner.terminate()
        assert owner.wait(30) == 128 + signal.SIGTERM
        assert namespaces_of(name) == [
            f"{name}-h0",
            f"{name}-switch",
        ]  # the new one, which was not the owner's to remove


def test_a_program_holds_the_cluster_that_it_runs_on(name: str) -> None:
    make = f"from osu_bench.cluster import Cluster; Cluster.up(1, name='{name}')"
    subprocess.run([sys.executable, "-c", make], env=ENVIRONMENT, check=True)
    found = Cluster.current(name)
    with found.start(["sleep", "100"]), pytest.raises(ClusterError, match=f"in use by process {os.getpid()}"):
        Cluster.up(1, name=name)
    found.down()


def test_the_same_cluster_is_found_by_others_until_it_is_down(name: str) -> None:
    with Cluster.up(2, "100mbit", 2, name=name) as made:
        made.cut(1, 1)
        assert Cluster.current(name).status() == made.status()
        Cluster.current(name).down()
    with pytest.raises(ClusterError) as error:
        Cluster.current(name)
    expected = f"cluster {name}: expected a cluster that is up, got none. Make one with `osu_bench cluster up`."
    assert str(error.value) == expected


def test_a_cluster_that_lost_a_host_is_not_up(name: str) -> None:
    with Cluster.up(2, name=name):
        subprocess.run(["ip", "netns", "del", f"{name}-h1"], check=True)
        with pytest.raises(ClusterError, match="expected a cluster that is up, got none"):
            Cluster.current(name)


def test_a_process_that_ignores_its_end_is_ended() -> None:
    deaf = ["bash", "-c", "trap '' TERM; echo there; while :; do sleep 1; done"]
    with subprocess.Popen(deaf, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None and running.stdout.readline() == "there\n"
        end(lambda: [found] if (found := process(running.pid)) else [], grace=0.2)
        ended = process(running.pid) is None
        running.kill()
    assert ended


def test_two_clusters_do_not_meet(name: str) -> None:
    other = new_name()
    with Cluster.up(1, name=name) as first, Cluster.up(1, name=other):
        first.down()
        assert namespaces_of(other) == [f"{other}-h0", f"{other}-switch"]
