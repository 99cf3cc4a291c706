"""Synthetic training data: sentences of a small grammar, and noisy images of shapes."""

from __future__ import annotations

from random import Random

import torch

__all__ = ["CLASSES", "SIDE", "generate_text", "shape_images", "text_windows"]

NAMES = ["Ada", "Blaise", "Carl", "Emmy", "Grace", "Kurt", "Niels", "Sofia"]
NOUNS = ["bridge", "engine", "garden", "lantern", "letter", "machine", "mirror", "river", "signal", "window"]
ADJECTIVES = ["broken", "bright", "careful", "distant", "heavy", "hidden", "narrow", "quiet", "sudden", "yellow"]
VERBS = ["builds", "carries", "draws", "finds", "follows", "measures", "mends", "opens", "paints", "remembers"]
TIMES = ("at dawn", "before noon", "every winter", "in the dark", "without a word")
CLASSES, SIDE = 8, 24
"""Number of shape classes, and width and height of an image in pixels."""


def generate_text(seed: int, length: int) -> str:
    """Return `length` characters of text whose questions and sums have consistent answers."""
    random, paragraphs, generated = Random(seed), [], 0
    while generated < length:
        paragraphs.append(_paragraph(random))
        generated += len(paragraphs[-1])
    return "".join(paragraphs)[:length]


def _paragraph(random: Random) -> str:
    who, other = random.sample(NAMES, 2)
    verb, noun, time = random.choice(VERBS), _noun_phrase(random), random.choice(TIMES)
    number, more = random.randint(2, 40), random.randint(2, 40)
    parts = [
        f"{who} {verb} {noun} {time}.",
        f"Who {verb} it? {who} does.",
        f"{other} counts {number} and {more}, which is {number + more}.",
        f'"{noun.capitalize()} is {random.choice(ADJECTIVES)}," says {other}.',
    ]
    return " ".join(parts[: random.randint(2, 4)]) + "\n"


def _noun_phrase(random: Random) -> str:
    adjectives = random.sample(ADJECTIVES, random.randint(0, 2))
    return " ".join(["the", *adjectives, random.choice(NOUNS)])


def text_windows(
    text: torch.Tensor, length: int, count: int, random: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `count` random windows of the text, and the same windows shifted by one character."""
    starts = torch.randint(len(text) - length - 1, (count, 1), generator=random)
    positions = starts + torch.arange(length)
    return text[positions], text[positions + 1]


def shape_images(count: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy images of shapes with random position, size and rotation, and the class of each."""
    classes = torch.randint(CLASSES, (count,), generator=random)
    center = (torch.rand(2, count, 1, 1, generator=random) - 0.5) * 0.6
    size = 0.35 + 0.35 * torch.rand(count, 1, 1, generator=random)
    angle = torch.rand(count, 1, 1, generator=random) * 2 * torch.pi
    line = torch.linspace(-1, 1, SIDE)
    x, y = (line.view(1, 1, SIDE) - center[0]) / size, (line.view(1, SIDE, 1) - center[1]) / size
    across, along = x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()
    inside = _inside(across, along).gather(0, classes.view(1, -1, 1, 1).expand(1, -1, SIDE, SIDE))[0]
    contrast = 0.5 + 0.5 * torch.rand(count, 1, 1, generator=random)
    noise = 0.2 * torch.randn(count, SIDE, SIDE, generator=random)
    return (contrast * inside + noise).unsqueeze(1), classes


def _inside(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return, for each class, 1 at points inside the unit shape and 0 elsewhere."""
    radius, square = (x * x + y * y).sqrt(), torch.maximum(x.abs(), y.abs())
    shapes = [
        radius < 1,
        (radius < 1) & (radius > 0.6),
        square < 0.85,
        (square < 0.85) & (square > 0.5),
        x.abs() + y.abs() < 1,
        (y > -0.6) & (y + 1.7 * x.abs() < 1),
        (torch.minimum(x.abs(), y.abs()) < 0.25) & (square < 1),
        (x.abs() < 1) & (y.abs() < 0.3),
    ]
    return torch.stack(shapes).float()
