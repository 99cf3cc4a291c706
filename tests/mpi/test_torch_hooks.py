"""The DDP hook, and broadcasts of parameters and of their differences, on three ranks."""

from __future__ import annotations

import pytest
from launch import needs_mpirun, run

pytest.importorskip("torch")

GLOO = (
    *("lossless", "feedback", "warm_up", "roles", "overflow", "overlap", "two_models"),
    *("sync", "after_step", "any_order", "invalid_arguments", "failure"),
    *("sub_group", "repeated_deltas", "state_dicts"),
)
OURS = ("lossless", "two_models", "sync", "sub_group", "repeated_deltas")
DELTAS = ("every_type", "unrelated", "missed", "failed", "refused", "ends", "in_any_order")


@needs_mpirun
@pytest.mark.parametrize(
    ("program", "checks"),
    [(("torch_hooks", "gloo"), GLOO), (("torch_hooks", "gpucomp"), OURS), (("delta",), DELTAS)],
    ids=["gloo", "gpucomp", "delta"],
)
def test_on_three_ranks(program: tuple[str, ...], checks: tuple[str, ...]) -> None:
    done = run(3, "-m", "mpi4py", f"tests/mpi/{program[0]}.py", *program[1:], *checks)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{check}: passed on 3 ranks" for check in checks]
