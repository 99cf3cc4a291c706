"""Calls that do not match among the ranks, under mpirun: an error on every rank, and no hang."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from launch import needs_mpirun, run

pytestmark = needs_mpirun

RANKS = 3
ODD = 1
"""The rank whose call differs from the others'."""


def outcomes(kind: str, mpich: Path | None, *arguments: str) -> list[dict[str, tuple[str, bool]]]:
    """Run the program; return for each rank and each case the error, and whether the communicator still works."""
    done = run(RANKS, "tests/mpi/mismatch.py", kind, *arguments, mpich=mpich)
    assert done.returncode == 0, done.stderr
    everyone = json.loads(done.stdout.splitlines()[0])
    assert len(everyone) == RANKS
    assert everyone[0]
    unusable = {
        f"{name}, rank {rank}" for rank, found in enumerate(everyone) for name, (_, ok) in found.items() if not ok
    }
    assert not unusable
    return everyone


def has_word(word: str, text: str) -> bool:
    return re.search(rf"\b{word}\b", text) is not None


@pytest.mark.parametrize("codec", ["split", "none", "auto"])
def test_different_collectives_are_an_error_on_every_rank_that_names_both(any_mpi: Path | None, codec: str) -> None:
    wrong = []
    for rank, found in enumerate(outcomes("collectives", any_mpi, f"codec={codec}")):
        for case, (error, _) in found.items():
            odd, others, _ = case.split()
            if not error.startswith(f"AgreementError: rank {rank}: ") or not (
                has_word(odd, error) and has_word(others, error)
            ):
                wrong.append(f"{case}, rank {rank}: {error}")
    assert wrong == []


@pytest.mark.parametrize("codec", ["split", "none"])
def test_different_types_are_an_error_on_every_rank_before_a_buffer_is_touched(
    any_mpi: Path | None, codec: str
) -> None:
    wrong = []
    for rank, found in enumerate(outcomes("types", any_mpi, f"codec={codec}")):
        for case, (error, _) in found.items():
            names_both = has_word("float32", error) and has_word("float64", error)
            if not error.startswith(f"AgreementError: rank {rank}: ") or not names_both:
                wrong.append(f"{case}, rank {rank}: {error}")
    assert wrong == []


@pytest.mark.parametrize("codec", ["split", "auto"])
def test_an_exception_while_a_call_is_read_reaches_every_rank(any_mpi: Path | None, codec: str) -> None:
    wrong = []
    for rank, found in enumerate(outcomes("arguments", any_mpi, f"codec={codec}")):
        for case, (error, _) in found.items():
            if rank == ODD:
                right = error != "no error" and not error.startswith(("AgreementError", "PeerError", "DeadlockError"))
                right = right and ("ZeroDivisionError: no" in error or not case.startswith("__"))
                right = right and not error.startswith("AttributeError")
            else:
                right = error.startswith((f"AgreementError: rank {rank}: ", f"PeerError: rank {rank}: "))
                right = right and has_word(f"rank {ODD}", error)
                right = right and error.count(f"rank {ODD}: ") <= 1 and ".." not in error.replace("...", "")
            if not right:
                wrong.append(f"{case}, rank {rank}: {error}")
    assert wrong == []


def test_an_unknown_option_is_an_error_with_a_suggestion(any_mpi: Path | None) -> None:
    wrong = []
    for rank, found in enumerate(outcomes("options", any_mpi)):
        for case, (error, _) in found.items():
            _, given, meant, _ = case.split()
            suggestion = f"did you mean {meant}?" if meant != "-" else "codec"
            if not has_word(given, error) or suggestion not in error.lower().replace("'", ""):
                wrong.append(f"{case}, rank {rank}: {error}")
    assert wrong == []


@pytest.mark.parametrize("codec", ["auto", "split"])
def test_counts_of_v_variants_that_differ_are_an_error_on_every_rank(any_mpi: Path | None, codec: str) -> None:
    wrong = []
    for rank, found in enumerate(outcomes("counts", any_mpi, f"codec={codec}")):
        for case, (error, _) in found.items():
            if not error.startswith(f"AgreementError: rank {rank}: ") or not re.search("sending|receiving|sum", error):
                wrong.append(f"{case}, rank {rank}: {error}")
    assert wrong == []
