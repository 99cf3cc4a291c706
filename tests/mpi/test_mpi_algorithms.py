"""Algorithms of the MPI library: correct results on two MPIs, settings that take effect and are restored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from launch import needs_mpirun, run

from mpi_gpucomp._tuning import mpi_algorithms as algorithms
from mpi_gpucomp.errors import SpecError

MPIS = ("Open MPI", "MPICH")


@needs_mpirun
@pytest.mark.parametrize("mpi", MPIS)
class TestTuned:
    """One job for each MPI, whose results all tests share."""

    FOUND: dict[str, dict[str, Any]] = {}  # noqa: RUF012

    @pytest.fixture
    def found(self, mpi: str, request: pytest.FixtureRequest) -> dict[str, Any]:
        """Return the results of the job."""
        mpich = request.getfixturevalue("mpich") if mpi == "MPICH" else None
        if mpi not in self.FOUND:
            done = run(3, "-W", "error", "tests/mpi/mpi_algorithms.py", mpich=mpich)
            assert done.returncode == 0, done.stderr
            self.FOUND[mpi] = json.loads(done.stdout.splitlines()[0])
        if self.FOUND[mpi]["family"] != mpi:
            pytest.skip(f"the MPI here is of the family {self.FOUND[mpi]['family']}")
        return self.FOUND[mpi]

    def test_every_candidate_gives_what_the_default_gives(self, found: dict[str, Any]) -> None:
        assert found["every_candidate"]["wrong"] == []

    def test_the_library_has_every_algorithm_of_the_table(self, found: dict[str, Any], mpi: str) -> None:
        family = next(family for family in algorithms.FAMILIES if family.name == mpi)
        expected = {name: ["default", *table] for name, table in family.table.items()}
        assert found["every_candidate"]["tried"] == expected
        assert list(expected) == list(algorithms.OPEN_MPI.table)
        assert all(3 <= len(names) <= 8 for names in expected.values())

    def test_the_winner_runs_in_the_block_and_nowhere_else(self, found: dict[str, Any]) -> None:
        effect = found["settings_take_effect"]
        assert (effect["best"], effect["around"], effect["closed"]) == (True, False, False)
        assert effect["name"] == next(name for name in effect["shapes"] if name.startswith("pipeline"))

    def test_broadcasts_have_the_selected_shape(self, found: dict[str, Any]) -> None:
        shapes = found["settings_take_effect"]["shapes"]
        assert shapes["default"] is shapes["binomial tree"] is False
        assert {shape for name, shape in shapes.items() if name.startswith("pipeline")} == {True}

    def test_a_much_slower_candidate_runs_once(self, found: dict[str, Any]) -> None:
        assert sorted(found["giving_up"].values()) == [1, *[3] * (len(found["giving_up"]) - 1)]
        assert found["giving_up"]["ring"] == 1

    def test_variables_are_set_and_restored(self, found: dict[str, Any]) -> None:
        variables = found["variables"]
        assert (variables["set"], variables["changed"], variables["restored"]) == (True, 4, True)
        assert variables["third"] in ("pipeline", "smp") and variables["restored after errors"] is True

    def test_the_thread_level_is_unchanged(self, found: dict[str, Any]) -> None:
        before, after = found["threads"]
        assert before == after

    def test_errors_name_the_variable_and_the_valid_values(self, found: dict[str, Any], mpi: str) -> None:
        errors, version, stem = found["variables"]["errors"], found["version"], found["stem"]
        assert errors["unknown"] == (
            f"control variable no_such: expected one that {version} has, got none of this name. "
            "List them with `ompi_info --all` or `mpivars`."
        )
        means = f"See the documentation of {version}."
        assert errors["name"].startswith(f"control variable {stem}: expected one of ")
        assert errors["name"].endswith(f"binomial, {NEXT_CHOICES[mpi]}, got 'no_such'. {means}")
        name, most = LONGEST_TEXT[mpi]
        assert errors["text"] == f"control variable {name}: expected at most {most} characters, got 4000. {means}"

    def test_a_variable_that_cannot_be_set(self, found: dict[str, Any], mpi: str) -> None:
        if mpi == "MPICH":
            pytest.skip("MPICH lets every variable be set")
        assert found["variables"]["errors"]["read-only"] == (
            "control variable mpi_param_check: expected MPI_T_cvar_write to succeed, "
            "got MPI_T_ERR_CVAR_SET_NEVER: variable cannot be set until end of execution. "
            "Some variables can only be set before MPI starts, in the environment."
        )


NEXT_CHOICES = {
    "Open MPI": "knomial, scatter_allgather, scatter_allgather_ring",
    "MPICH": "nb, smp, scatter_recursive_doubling_allgather, scatter_ring_allgather, pipelined_tree, tree",
}
LONGEST_TEXT = {
    "Open MPI": ("coll_tuned_dynamic_rules_filename", 2047),
    "MPICH": ("MPIR_CVAR_ALLREDUCE_TREE_TYPE", 383),
}


def test_an_unknown_mpi_has_the_default_only() -> None:
    (only,) = algorithms.known_variants("bcast", None)
    assert only.name == "default, the only variant known for this MPI library"
    assert only.settings == {}


@needs_mpirun
def test_tuned_communicators_are_used_and_defaults_stay_unchanged() -> None:
    """A tuned communicator serves its range of sizes; the library's default is untouched."""
    done = run(3, "tests/mpi/tuned_comm.py")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    if not found["keeps"]:
        assert found["better"] == []
        return
    assert found["wrong"] == 0
    assert found["used"] == ["default", "tuned", "tuned", "default"]
    assert found["algorithm outside"] == found["algorithm before"]


def test_an_unknown_collective_is_an_error() -> None:
    with pytest.raises(SpecError) as caught:
        algorithms.variants("scan")
    assert str(caught.value) == (
        "collective: expected one of bcast, reduce, allreduce, allgather, reduce_scatter, reduce_scatter_block, "
        "alltoall, gather, scatter, got 'scan'. Compare with mpi in place of mpi-tuned."
    )
