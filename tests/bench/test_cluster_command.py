"""The command `cluster`, each call a process of its own."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster_machine import COMMAND, ENVIRONMENT, RANKS, new_name, skip_unless_possible

from osu_bench.cluster.plan import namespaces_of
from osu_bench.cluster.processes import within

Said = tuple[int, str, str]


@pytest.fixture(scope="module")
def name() -> Iterator[str]:
    skip_unless_possible()
    chosen = new_name()
    try:
        yield chosen
    finally:
        subprocess.run([*COMMAND, "down", "--name", chosen], capture_output=True, env=ENVIRONMENT, check=True)


@pytest.fixture(scope="module")
def command(name: str) -> Callable[..., Said]:
    def run(action: str, *arguments: str) -> Said:
        words = [*COMMAND, action, "--name", name, *arguments]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=ENVIRONMENT, check=False)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
def up(command: Callable[..., Said]) -> Iterator[None]:
    assert command("up", "--hosts", "2")[0] == 0
    yield
    assert command("down")[0] == 0


def test_the_commands_work_together(command: Callable[..., Said]) -> None:
    whole = (
        "host  rail  address    rate     link\n"
        "h0    0     10.78.0.1  500mbit  up\n"
        "h0    1     10.78.1.1  500mbit  up\n"
        "h1    0     10.78.0.2  500mbit  up\n"
        "h1    1     10.78.1.2  500mbit  up\n"
    )
    assert command("up", "--hosts", "2", "--rate", "500mbit", "--rails", "2") == (0, whole, "")
    assert command("cut", "1")[1].splitlines()[3].endswith("down")
    assert command("cut", "1", "1", "--silent")[1].splitlines()[4].endswith("silent")
    assert command("cut", "0", "1", "--loss", "2.5")[1].splitlines()[2].endswith("loss 2.5 %")
    assert command("heal", "1", "0")[1].splitlines()[3:] == [
        "h1    0     10.78.0.2  500mbit  up",
        "h1    1     10.78.1.2  500mbit  silent",
    ]
    assert command("heal") == (0, whole, "")
    assert command("rate", "unlimited", "0", "1")[1].splitlines()[2].split() == [
        "h0",
        "1",
        "10.78.1.1",
        "unlimited",
        "up",
    ]
    assert command("rate", "0.5gbit") == command("status") == (0, whole, "")
    assert command("down") == (0, "removed; namespaces: 3, processes: 0\n", "")
    assert command("down") == (0, "nothing is up\n", "")


def test_what_is_not_up_cannot_be_used(command: Callable[..., Said], name: str) -> None:
    shown = (
        f"osu_bench: cluster {name}: expected a cluster that is up, got none. Make one with `osu_bench cluster up`.\n"
    )
    for words in (["status"], ["cut", "0"], ["heal"], ["rate", "1gbit"], ["run", "--", "true"]):
        assert command(*words) == (2, "", shown)


@pytest.mark.usefixtures("up")
def test_up_once_more_replaces_what_nobody_uses(command: Callable[..., Said], name: str) -> None:
    code, _, shown = command("up", "--hosts", "1")
    assert (code, shown) == (
        0,
        f"cluster {name}: removed the remains of an earlier one; namespaces: 3, processes: 0\n",
    )
    assert namespaces_of(name) == [f"{name}-h0", f"{name}-switch"]


@pytest.mark.usefixtures("up")
def test_programs_run_and_give_their_exit_code(command: Callable[..., Said], mpich: Path) -> None:
    assert command("run", "-n", "1", "--", "bash", "-c", "hostname; exit 3")[:2] == (3, "h0\n")
    code, shown, _ = command("run", "--mpich", str(mpich), "--", "hostname")
    assert (code, sorted(shown.split())) == (0, ["h0", "h1"])


@pytest.mark.usefixtures("up")
def test_several_ranks_on_a_host(command: Callable[..., Said]) -> None:
    program = ["--", "bash", "-c", "echo $OMPI_COMM_WORLD_RANK:$(hostname)"]
    code, shown, _ = command("run", "--per-host", "2", *program)
    assert (code, sorted(shown.split())) == (0, ["0:h0", "1:h0", "2:h1", "3:h1"])
    code, shown, _ = command("run", "--per-host", "2", "--in-turn", *program)
    assert (code, sorted(shown.split())) == (0, ["0:h0", "1:h1", "2:h0", "3:h1"])
    code, _, shown = command("run", "--per-host", "2", "-n", "5", *program)
    assert code == 2
    assert "expected 1 to 4, got 5. Each host runs 2 ranks: use fewer, or make a larger cluster." in shown


@pytest.mark.usefixtures("up")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_ends_the_ranks_and_leaves_the_cluster(
    command: Callable[..., Said], name: str, number: signal.Signals, code: int
) -> None:
    words = [*COMMAND, "run", "--name", name, "--", *RANKS, "wait"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "there\n"  # and so output comes as it is made
        running.send_signal(number)
        running.communicate(timeout=30)
    assert running.returncode == code
    assert within(namespaces_of(name)) == []
    assert command("status")[0] == 0


@pytest.mark.usefixtures("up")
def test_down_ends_what_runs(command: Callable[..., Said], name: str) -> None:
    words = [*COMMAND, "run", "--name", name, "--", *RANKS, "wait"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as running:
        assert running.stdout is not None and running.stdout.readline() == "there\n"
        code, _, shown = command("up", "--hosts", "1")
        assert code == 2 and f"got one in use by process {running.pid}. " in shown
        assert command("down")[0] == 0
        running.communicate(timeout=30)
    assert running.returncode not in (None, 0)
