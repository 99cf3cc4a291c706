"""The command `selftest`: on the host, on the simulated GPU, and with a library that computes wrong results."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from launch import ROOT, needs_mpirun, run
from simulated_cuda import SETTINGS as SIMULATED

from mpi_gpucomp.cli import selftest
from mpi_gpucomp.cli.main import main
from mpi_gpucomp.codec.split import Split

MODULE, SIZE = ("-m", "mpi_gpucomp"), "1MB"


def test_on_the_host_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--size", SIZE]) == 0
    report = capsys.readouterr().out
    assert report.splitlines()[0].startswith("mpi_gpucomp ")
    assert f"all {len(selftest.CHECKS)} checks passed" in report
    assert "split           bfloat16   1.5" in report
    assert "one rank: start several with mpirun" in report


@needs_mpirun
def test_on_several_ranks() -> None:
    done = run(3, *MODULE, "selftest", "--size", SIZE)
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 ranks" in done.stdout
    assert "Bcast of 1 MB, 3 ranks" in done.stdout


@needs_mpirun
def test_on_simulated_gpus_it_says_so() -> None:
    """All checks run, and the machine finds nothing wrong with how they use CUDA."""
    settings = {SIMULATED: os.environ.get(SIMULATED) or "seed=1"}
    program = ("-m", "tests.simulated_cuda", "mpi_gpucomp/__main__.py", "selftest", "--gpu", "--size", SIZE)
    done = run(2, *program, environment=settings)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "This GPU is simulated in software" in done.stdout
    assert "19 pairs of codec and type: as on the host" in done.stdout
    assert "5 broadcasts of arrays that a stream was still writing: right" in done.stdout
    assert "out of memory" in done.stdout


def test_without_a_gpu_it_says_what_is_missing() -> None:
    command = [sys.executable, *MODULE, "selftest", "--gpu"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "device cuda:0: expected" in done.stderr


def test_a_wrong_result_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "_expect", _reject)
    assert main(["selftest", "--size", SIZE]) == 1
    report = capsys.readouterr().out
    assert "collectives\n  FAILED, " in report
    assert "rank 0: Bcast from 0, codec none: wrong" in report
    assert f"2 of {len(selftest.CHECKS)} checks failed" in report


def _reject(context: object, array: object, wanted: np.ndarray, what: str) -> None:
    raise selftest.CheckFailed(f"{what}: wrong")


def test_a_codec_that_is_not_lossless_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = Split.decode

    def damaged(self, source, nbytes, to, stream):
        pending = decode(self, source, nbytes, to, stream)
        pending.result()
        stream.fill(to.address, 0, 4)
        return pending

    monkeypatch.setattr(Split, "decode", damaged)
    assert main(["selftest", "--size", SIZE]) == 1
    assert "split of float32 is not lossless" in capsys.readouterr().out
