"""Settings: precedence, errors that name the variable, and the documentation that is made from them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from simulated_cuda import SETTINGS as SIMULATED

from mpi_gpucomp import config
from mpi_gpucomp.config import SETTINGS, Resolved, Setting, markdown_table, unknown_variables
from mpi_gpucomp.errors import SpecError

ROOT = Path(__file__).parents[2]


def test_an_argument_takes_precedence_over_the_environment_and_that_over_the_default() -> None:
    environment = {"MPI_GPUCOMP_RAILS": "eth0"}
    assert config.RAILS.resolve("", environment) == Resolved("", "argument")
    assert config.RAILS.resolve(None, environment) == Resolved("eth0", "environment")
    assert config.RAILS.resolve(None, {}) == Resolved("", "default")


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_an_empty_variable_counts_as_unset(setting: Setting[object]) -> None:
    assert setting.resolve(None, {setting.variable: ""}) == Resolved(setting.default, "default")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("WORKERS", "3", 3),
        ("CUDA_AWARE", "0", False),
        ("SEGMENT_BYTES", "0", 0),
        ("SEGMENT_BYTES", "8193", 8193),
        ("RAILS", "eth0+eth1,mgmt", "eth0+eth1,mgmt"),
        ("RAIL_TIMEOUT", "0.5", 0.5),
        ("RAIL_WIRE", "ucx", "ucx"),
        ("MONITOR", "off", False),
        ("MONITOR", " Yes", True),
        ("MONITOR", "/dev/shm/job", "/dev/shm/job"),
        ("RECORDS", "1000", 1024),
        ("SERVE", "0.0.0.0:9400", "0.0.0.0:9400"),
    ],
)
def test_values_are_read_from_the_environment(name: str, text: str, value: object) -> None:
    setting: Setting[object] = getattr(config, name)
    assert setting.resolve(None, {setting.variable: text}) == Resolved(value, "environment")


@pytest.mark.parametrize(
    ("name", "text", "rest"),
    [
        (
            "WORKERS",
            "0",
            "expected a whole number of at least 1, got '0'. "
            "Set the number of threads that share one kernel, or unset it to use every core.",
        ),
        (
            "CUDA_AWARE",
            "yes",
            "expected 0 or 1, got 'yes'. "
            "Set 1 if MPI is GPU-aware, 0 to stage through pinned memory, or unset it to detect it.",
        ),
        (
            "SEGMENT_BYTES",
            "8192",
            "expected at least 8193 bytes, or 0 for messages that are sent whole, got '8192'. Change or unset it.",
        ),
        (
            "RAILS",
            "eth0,eth0",
            "expected devices that differ, such as eth0,eth1 or eth0+eth1, got 'eth0,eth0'. Name each device once.",
        ),
        ("RAIL_TIMEOUT", "inf", "expected a number of seconds above 0, got 'inf'. Change or unset it."),
        ("RAIL_LIMIT", "-1", "expected a number of seconds above 0, got '-1'. Change or unset it."),
        ("RAIL_WIRE", "UCX", "expected tcp, ucx or auto, got 'UCX'. Choose one of them."),
        ("RECORDS", "63", "expected a whole number from 64 to 16777216, got '63'. Change or unset it."),
        ("HANG", "soon", "expected a number above 0, got 'soon'. Change or unset it."),
        (
            "SERVE",
            "localhost",
            "expected [address:]port, got 'localhost'. Write 9400, or 0.0.0.0:9400 to let other machines read it.",
        ),
    ],
)
def test_an_invalid_value_is_an_error_that_names_the_variable(name: str, text: str, rest: str) -> None:
    setting: Setting[object] = getattr(config, name)
    with pytest.raises(SpecError) as caught:
        setting.get(None, {setting.variable: text})
    assert str(caught.value) == f"environment variable MPI_GPUCOMP_{name}: {rest}"


def test_unknown_variables_are_listed_with_the_closest_setting() -> None:
    environment = {"MPI_GPUCOMP_RIALS": "eth0", "MPI_GPUCOMP_NOVELTY": "1", "MPI_GPUCOMP_RAILS": "eth0", "PATH": ""}
    assert unknown_variables(environment) == {"MPI_GPUCOMP_NOVELTY": None, "MPI_GPUCOMP_RIALS": "MPI_GPUCOMP_RAILS"}


def test_every_variable_of_the_library_is_a_setting() -> None:
    known = {setting.variable for setting in SETTINGS}
    assert len(known) == len(SETTINGS)
    files = [*(ROOT / "mpi_gpucomp").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    named = {name for file in files for name in re.findall(r"MPI_GPUCOMP_[A-Z][A-Z_]*[A-Z]", file.read_text())}
    assert named <= known | {SIMULATED}


def test_the_environment_is_read_in_one_place() -> None:
    direct = [
        str(file.relative_to(ROOT))
        for file in (ROOT / "mpi_gpucomp").rglob("*.py")
        if file.name != "config.py" and re.search(r"environ(\.get\(|\[)[^)\]]*MPI_GPUCOMP_", file.read_text())
    ]
    assert direct == []


def test_the_documentation_has_the_table_of_settings() -> None:
    # To update it: python -c "from mpi_gpucomp.config import markdown_table; print(markdown_table())"
    page = (ROOT / "docs" / "SETTINGS.md").read_text()
    begin, end = "<!-- settings -->\n", "\n<!-- end of settings -->"
    assert page.partition(begin)[2].partition(end)[0] == markdown_table()


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_settings_refer_to_pages_that_mention_them(setting: Setting[object]) -> None:
    assert not setting.page or f"{setting.variable}" in (ROOT / "docs" / setting.page).read_text()
