"""What is learned: a model, its data, and a measure of how well it has learned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from osu_bench.training.data import drawings, sentences, windows
from osu_bench.training.models import Transformer, residual_network

if TYPE_CHECKING:
    from torch import nn

    Pair = tuple[torch.Tensor, torch.Tensor]

__all__ = ["SIZES", "TASKS", "Size", "Task"]

LETTERS, KEPT_BACK = 1 << 18, 1 << 14
"""Letters of the text, and those at its end that are only used to validate."""
LENGTH = 64
"""Letters that the transformer sees at once."""


class Size(NamedTuple):
    """How large a model is, and how it is trained."""

    width: int
    layers: int
    batch: int
    """Examples of a rank in each step."""
    rate: float
    validated: int
    """Examples that a model is validated with, the same for all."""


class Task(ABC):
    """Something to learn, of one size; all ranks make the same."""

    def __init__(self, size: Size) -> None:
        """Make the data."""
        self.size = size

    @abstractmethod
    def model(self) -> nn.Module:
        """Make an untrained model, of torch's random numbers."""

    @abstractmethod
    def batch(self, count: int, random: torch.Generator, *, held_back: bool = False) -> Pair:
        """Draw examples and what is to be said of them; some are held back, to validate."""

    def loss(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return how wrong a model is."""
        scores = model(x)
        return functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), y.reshape(-1))

    def validate(self, model: nn.Module) -> float:
        """Return how wrong a model is with examples that it has not seen."""
        random = torch.Generator().manual_seed(1)
        with torch.no_grad():
            return float(self.loss(model, *self.batch(self.size.validated, random, held_back=True)))


class Text(Task):
    """The next letter of a text."""

    def __init__(self, size: Size) -> None:
        """Write the text."""
        super().__init__(size)
        text = sentences(1, LETTERS)
        self._alphabet = sorted(set(text))
        numbers = {letter: number for number, letter in enumerate(self._alphabet)}
        self._text = torch.tensor([numbers[letter] for letter in text])

    def model(self) -> nn.Module:
        """Make a transformer."""
        return Transformer(len(self._alphabet), LENGTH, self.size.width, self.size.layers)

    def batch(self, count: int, random: torch.Generator, *, held_back: bool = False) -> Pair:
        """Take pieces of the text."""
        return windows(self._text[-KEPT_BACK:] if held_back else self._text[:-KEPT_BACK], LENGTH, count, random)


class Shapes(Task):
    """The kind of a drawn shape."""

    def model(self) -> nn.Module:
        """Make a residual network."""
        return residual_network(tuple(self.size.width << stage for stage in range(self.size.layers)))

    def batch(self, count: int, random: torch.Generator, *, held_back: bool = False) -> Pair:
        """Draw shapes; there are so many that none is drawn twice."""
        return drawings(count, random)


TASKS: dict[str, type[Task]] = {"transformer": Text, "resnet": Shapes}
SIZES = {
    ("transformer", "small"): Size(128, 2, 8, 2e-3, 256),
    ("transformer", "large"): Size(512, 3, 2, 3e-4, 64),
    ("resnet", "small"): Size(16, 3, 16, 2e-3, 256),
    ("resnet", "large"): Size(64, 4, 4, 1e-3, 128),
}
"""Small ones to compare losses with, large ones (10 million parameters) to compare times with."""
