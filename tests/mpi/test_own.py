"""The best of MPI's own: right results on two MPIs, settings that take effect and go back, threads left alone."""

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
    """One job for each MPI, whose findings the tests look at."""

    FOUND: dict[str, dict[str, Any]] = {}  # noqa: RUF012

    @pytest.fixture
    def found(self, mpi: str, request: pytest.FixtureRequest) -> dict[str, Any]:
        """Return what the job has found."""
        mpich = request.getfixturevalue("mpich") if mpi == "MPICH" else None
        if mpi not in self.FOUND:
            done = run(3, "-W", "error", "tests/mpi/own_algorithms.py", mpich=mpich)
            assert done.returncode == 0, done.stderr
            self.FOUND[mpi] = json.loads(done.stdout.splitlines()[0])
        if self.FOUND[mpi]["family"] != mpi:
            pytest.skip(f"the MPI here is of the family {self.FOUND[mpi]['family']}")
        return self.FOUND[mpi]

    def test_every_candidate_gives_what_the_default_gives(self, found: dict[str, Any]) -> None:
        assert found["every_candidate"]["wrong"] == []

    def test_the_library_has_all_that_is_in_the_table(self, found: dict[str, Any], mpi: str) -> None:
        family = next(family for family in algorithms.FAMILIES if family.name == mpi)
        expected = {name: ["default", *table] for name, table in family.table.items()}
        assert found["every_candidate"]["tried"] == expected
        assert list(expected) == list(algorithms.COLLECTIVES)
        assert all(3 <= len(names) <= 8 for names in expected.values())

    def test_the_winner_runs_in_the_block_and_nowhere_else(self, found: dict[str, Any]) -> None:
        effect = found["settings_take_effect"]
        assert (effect["best"], effect["around"], effect["closed"]) == (True, False, False)
        assert effect["name"] == next(name for name in effect["shapes"] if name.startswith("pipeline"))

    def test_broadcasts_have_the_shape_that_was_asked_for(self, found: dict[str, Any]) -> None:
        shapes = found["settings_take_effect"]["shapes"]
        assert shapes["default"] is shapes["binomial tree"] is False
        assert {shape for name, shape in shapes.items() if name.startswith("pipeline")} == {True}

    def test_a_hopeless_candidate_is_tried_once(self, found: dict[str, Any]) -> None:
        assert sorted(found["giving_up"].values()) == [1, *[3] * (len(found["giving_up"]) - 1)]
        assert found["giving_up"]["ring"] == 1

    def test_variables_are_set_and_put_back(self, found: dict[str, Any]) -> None:
        variables = found["variables"]
        assert (variables["set"], variables["changed"], variables["restored"]) == (True, 4, True)
        assert variables["third"] in ("pipeline", "smp") and variables["behind errors"] is True

    def test_mpi_keeps_its_level_of_threads(self, found: dict[str, Any]) -> None:
        before, after = found["threads"]
        assert before == after

    def test_errors_say_what_is_wrong(self, found: dict[str, Any], mpi: str) -> None:
        errors, version, stem = found["variables"]["errors"], found["version"], found["stem"]
        assert errors["unknown"] == (
            f"control variable no_such: expected one that {version} has, got none of this name. "
            "List them with `ompi_info --all` or `mpivars`."
        )
        means = f"{version} says what its variables mean."
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
            "Some variables can only be set before MPI starts, by the environment."
        )


NEXT_CHOICES = {
    "Open MPI": "knomial, scatter_allgather, scatter_allgather_ring",
    "MPICH": "nb, smp, scatter_recursive_doubling_allgather, scatter_ring_allgather, pipelined_tree, tree",
}
LONGEST_TEXT = {
    "Open MPI": ("coll_tuned_dynamic_rules_filename", 2047),
    "MPICH": ("MPIR_CVAR_ALLREDUCE_TREE_TYPE", 383),
}


def test_of_an_unknown_mpi_only_the_default_is_known() -> None:
    (only,) = algorithms.known("bcast", None)
    assert only.name == "default, the only one that is known of this MPI library"
    assert only.settings == {}


@needs_mpirun
def test_auto_takes_the_best_of_open_mpi_and_nothing_that_others_would_feel() -> None:
    """A program that has the library's default measured beside ours finds it as it was."""
    done = run(3, "tests/mpi/own_in_use.py")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    if not found["keeps"]:
        assert found["better"] == []
        return
    assert found["wrong"] == 0
    assert found["used"] == ["plain", "better", "better", "plain"]
    assert found["algorithm outside"] == found["algorithm before"]


def test_an_unknown_collective_is_told() -> None:
    with pytest.raises(SpecError) as caught:
        algorithms.candidates("scan")
    assert str(caught.value) == (
        "collective: expected one of bcast, reduce, allreduce, allgather, reduce_scatter, reduce_scatter_block, "
        "alltoall, gather, scatter, got 'scan'. Compare with mpi in place of mpi-tuned."
    )
