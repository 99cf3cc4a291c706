"""What the examples learn from, made here: sentences of a small grammar, and drawings of shapes."""

from __future__ import annotations

from random import Random

import torch

__all__ = ["CLASSES", "SIDE", "drawings", "sentences", "windows"]

NAMES = ["Ada", "Blaise", "Carl", "Emmy", "Grace", "Kurt", "Niels", "Sofia"]
THINGS = ["bridge", "engine", "garden", "lantern", "letter", "machine", "mirror", "river", "signal", "window"]
QUALITIES = ["broken", "bright", "careful", "distant", "heavy", "hidden", "narrow", "quiet", "sudden", "yellow"]
DEEDS = ["builds", "carries", "draws", "finds", "follows", "measures", "mends", "opens", "paints", "remembers"]
TIMES = ("at dawn", "before noon", "every winter", "in the dark", "without a word")
CLASSES, SIDE = 8, 24
"""Kinds of drawings, and pixels of their width and height."""


def sentences(seed: int, letters: int) -> str:
    """Write so many letters of text, in sentences that agree with each other: who did what is asked and answered."""
    random, text, length = Random(seed), [], 0
    while length < letters:
        text.append(_paragraph(random))
        length += len(text[-1])
    return "".join(text)[:letters]


def _paragraph(random: Random) -> str:
    who, other = random.sample(NAMES, 2)
    deed, thing, time = random.choice(DEEDS), _thing(random), random.choice(TIMES)
    number, more = random.randint(2, 40), random.randint(2, 40)
    said = [
        f"{who} {deed} {thing} {time}.",
        f"Who {deed} it? {who} does.",
        f"{other} counts {number} and {more}, which is {number + more}.",
        f'"{thing.capitalize()} is {random.choice(QUALITIES)}," says {other}.',
    ]
    return " ".join(said[: random.randint(2, 4)]) + "\n"


def _thing(random: Random) -> str:
    some = random.sample(QUALITIES, random.randint(0, 2))
    return " ".join(["the", *some, random.choice(THINGS)])


def windows(text: torch.Tensor, length: int, count: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Take so many pieces of a text from anywhere in it, and the letters that follow each of theirs."""
    starts = torch.randint(len(text) - length - 1, (count, 1), generator=random)
    places = starts + torch.arange(length)
    return text[places], text[places + 1]


def drawings(count: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw so many shapes, each somewhere, of some size, turned somehow, under noise, and say of which kind each is."""
    kinds = torch.randint(CLASSES, (count,), generator=random)
    middle = (torch.rand(2, count, 1, 1, generator=random) - 0.5) * 0.6
    size = 0.35 + 0.35 * torch.rand(count, 1, 1, generator=random)
    angle = torch.rand(count, 1, 1, generator=random) * 2 * torch.pi
    line = torch.linspace(-1, 1, SIDE)
    x, y = (line.view(1, 1, SIDE) - middle[0]) / size, (line.view(1, SIDE, 1) - middle[1]) / size
    across, along = x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()
    inside = _inside(across, along).gather(0, kinds.view(1, -1, 1, 1).expand(1, -1, SIDE, SIDE))[0]
    contrast = 0.5 + 0.5 * torch.rand(count, 1, 1, generator=random)
    noise = 0.2 * torch.randn(count, SIDE, SIDE, generator=random)
    return (contrast * inside + noise).unsqueeze(1), kinds


def _inside(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return 1 for the points inside of each kind of shape of size 1."""
    round_, square = (x * x + y * y).sqrt(), torch.maximum(x.abs(), y.abs())
    shapes = [
        round_ < 1,
        (round_ < 1) & (round_ > 0.6),
        square < 0.85,
        (square < 0.85) & (square > 0.5),
        x.abs() + y.abs() < 1,
        (y > -0.6) & (y + 1.7 * x.abs() < 1),
        (torch.minimum(x.abs(), y.abs()) < 0.25) & (square < 1),
        (x.abs() < 1) & (y.abs() < 0.3),
    ]
    return torch.stack(shapes).float()
