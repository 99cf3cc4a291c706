"""The command `training`: its data, its figures, and equal losses with lossless codecs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from mpi_gpucomp.errors import BufferSpecError  # noqa: E402
from osu_bench.experiments.training.data import CLASSES, SIDE, generate_text, shape_images, text_windows  # noqa: E402
from osu_bench.experiments.training.results import Session, TrainingRun, load, merge_seeds, save, summaries  # noqa: E402
from osu_bench.experiments.training.task import SIZES, TASKS  # noqa: E402
from osu_bench.experiments.training.versions import ratio, versions  # noqa: E402
from osu_bench.launcher import find  # noqa: E402

ROOT = Path(__file__).parents[2]
LOSSLESS = ("none", "split", "delta")
LOSSY = ("bound:abs=1e-3", "p2p:zfp:rate=8", "none/bound:rel=1e-3")


def test_text_is_consistent_and_deterministic():
    text = generate_text(1, 50_000)
    assert len(text) == 50_000 and text == generate_text(1, 50_000) != generate_text(2, 50_000)
    sums = re.findall(r"counts (\d+) and (\d+), which is (\d+)\.", text)
    assert len(sums) > 100 and all(int(a) + int(b) == int(c) for a, b, c in sums)
    answers = re.findall(r"(\w+) (\w+) the [^.]*\. Who (\w+) it\? (\w+) does\.", text)
    assert len(answers) > 100 and all((who, verb) == (name, same) for who, verb, same, name in answers)


def test_targets_are_windows_shifted_by_one():
    text = torch.arange(1000)
    x, y = text_windows(text, 10, 50, torch.Generator().manual_seed(0))
    assert x.shape == (50, 10) and torch.equal(y, x + 1) and len(set(x[:, 0].tolist())) > 40


def test_shape_images_cover_every_class():
    images, classes = shape_images(400, torch.Generator().manual_seed(0))
    again, _ = shape_images(400, torch.Generator().manual_seed(0))
    assert images.shape == (400, 1, SIDE, SIDE) and set(classes.tolist()) == {*range(CLASSES)}
    assert torch.equal(images, again)
    assert images.mean() > 0.02


@pytest.mark.parametrize(("model", "steps", "batch", "better"), [("transformer", 15, 16, 0.8), ("resnet", 50, 64, 0.2)])
def test_models_learn(model, steps, batch, better, one_thread):
    torch.manual_seed(0)
    task = TASKS[model](SIZES[model, "small"])
    net, random = task.model(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=task.size.learning_rate)
    before = task.validate(net)
    for _ in range(steps):
        optimizer.zero_grad()
        task.loss(net, *task.batch(batch, random)).backward()
        optimizer.step()
    assert task.validate(net) < before - better


@pytest.fixture
def one_thread():
    """Limit torch to one thread: other tests use the cores too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_delta_of_similar_versions_is_small(one_thread):
    (early, late) = versions("transformer", "small", [1, 3], 1e-6)
    assert (early[0], late[0]) == (1, 3) and not torch.equal(early[2], late[1])
    assert ratio(late[1], late[2], "delta") > 1.5 > ratio(late[1], late[2], "split") > 1.15
    assert ratio(late[1], late[1], "delta") > 100


def session() -> Session:
    slow = [
        TrainingRun("none", seed, 10, [9, 9, 2, 2, 4], [3, 2, 1, 1, 1], [100] * 5, [50] * 5, 1.0) for seed in (1, 2)
    ]
    fast = [
        TrainingRun("split", seed, 10, [9, 9, 1, 1, 3], [3, 2, 1, 1, 1], [1, 1, 70, 80, 90], [50] * 5, float(seed))
        for seed in (1, 2)
    ]
    return Session("transformer", "small", 4, 1e9, 8, [slow[0], fast[0], slow[1], fast[1]], {"cores": 2})


def test_savings_compare_the_same_step():
    none, split = summaries(session())
    assert (none.seconds, none.saved, none.parameter_bytes, none.validation, none.spread) == (2, None, 100, 1.0, 0.0)
    assert (split.seconds, split.saved, split.parameter_bytes, split.gradient_bytes) == (1, 0.5, 80, 50)
    assert (split.validation, split.seeds) == (1.5, 2) and split.spread == pytest.approx(0.5**0.5)


def test_sessions_with_other_seeds_are_merged():
    whole = session()
    first, second = (replace(whole, trained=[run for run in whole.trained if run.seed == seed]) for seed in (1, 2))
    (merged,) = merge_seeds([first, second])
    assert summaries(merged) == summaries(whole)
    assert merge_seeds([first, replace(second, rate=None)]) == [first, replace(second, rate=None)]


def test_save_and_load_round_trip(tmp_path):
    save([session(), session()], tmp_path / "some.json")
    assert load(tmp_path / "some.json") == [session(), session()]
    (tmp_path / "other.json").write_text('{"format": "other"}')
    with pytest.raises(BufferSpecError) as caught:
        load(tmp_path / "other.json")
    assert str(caught.value) == (
        f"file {tmp_path / 'other.json'}: expected results of `osu_bench training`, got ValueError: format 'other'. "
        "Create one with `osu_bench training --json FILE`."
    )


def test_training_on_two_ranks(tmp_path):
    path, picture = tmp_path / "trained.json", tmp_path / "trained.png"
    candidates = ",".join((*LOSSLESS, *LOSSY, "gloo"))
    arguments = ["-m", "osu_bench", "training", "--steps", "5", "--compare", candidates, "--json", str(path)]
    launcher = find()
    done = subprocess.run(
        launcher.command(2, [sys.executable, *arguments, "--plot", str(picture)]),
        env={**os.environ, **launcher.environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (made,) = load(path)
    assert made.candidates() == candidates.split(",") and (made.model, made.ranks) == ("transformer", 2)
    by_name = {run.contender: run for run in made.trained}
    unencoded = by_name["none"]
    assert unencoded.losses[-1] < unencoded.losses[0] - 0.3
    for name in LOSSLESS:
        assert (by_name[name].losses, by_name[name].validation) == (unencoded.losses, unencoded.validation), name
    for name in LOSSY:
        assert by_name[name].losses != unencoded.losses, name
        assert by_name[name].losses == pytest.approx(unencoded.losses, abs=0.2), name
    assert by_name["gloo"].losses == pytest.approx(unencoded.losses, abs=1e-3)
    assert max(by_name["bound:abs=1e-3"].parameter_bytes) < min(by_name["split"].parameter_bytes)
    assert max(by_name["none/bound:rel=1e-3"].gradient_bytes) < min(unencoded.gradient_bytes)
    assert picture.read_bytes()[:4] == b"\x89PNG"
    shown = subprocess.run(
        [sys.executable, "-m", "osu_bench", "training", "--show", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert [line.split()[0] for line in shown.stdout.splitlines()[3:]] == candidates.split(",")
    assert shown.stdout.splitlines()[1].startswith("# transformer, 0.4 million parameters, 2 ranks, 5 steps")
