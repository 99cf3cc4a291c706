"""Training tasks: a model, its data and its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from osu_bench.experiments.training.data import generate_text, shape_images, text_windows
from osu_bench.experiments.training.models import Transformer, residual_network

if TYPE_CHECKING:
    from torch import nn

    Pair = tuple[torch.Tensor, torch.Tensor]

__all__ = ["SIZES", "TASKS", "Size", "Task"]

TEXT_LENGTH, VALIDATION_LENGTH = 1 << 18, 1 << 14
"""Characters of the text, and those at its end that are held out for validation."""
CONTEXT = 64
"""Characters of context of the transformer."""


class Size(NamedTuple):
    """Size of a model, and hyperparameters of its training."""

    width: int
    layers: int
    batch: int
    """Examples per rank and step."""
    learning_rate: float
    validation_examples: int


class Task(ABC):
    """A model and its data; the same on all ranks."""

    def __init__(self, size: Size) -> None:
        """Create the data."""
        self.size = size

    @abstractmethod
    def model(self) -> nn.Module:
        """Create an untrained model from torch's global random state."""

    @abstractmethod
    def batch(self, count: int, random: torch.Generator, *, validation: bool = False) -> Pair:
        """Draw inputs and targets, from the validation set if `validation`."""

    def loss(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of a batch."""
        logits = model(x)
        return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))

    def validate(self, model: nn.Module) -> float:
        """Return the loss on the validation set."""
        random = torch.Generator().manual_seed(1)
        with torch.no_grad():
            return float(self.loss(model, *self.batch(self.size.validation_examples, random, validation=True)))


class TextTask(Task):
    """Predict the next character of a text."""

    def __init__(self, size: Size) -> None:
        """Generate the text."""
        super().__init__(size)
        text = generate_text(1, TEXT_LENGTH)
        self._alphabet = sorted(set(text))
        index = {character: number for number, character in enumerate(self._alphabet)}
        self._text = torch.tensor([index[character] for character in text])

    def model(self) -> nn.Module:
        """Create a transformer."""
        return Transformer(len(self._alphabet), CONTEXT, self.size.width, self.size.layers)

    def batch(self, count: int, random: torch.Generator, *, validation: bool = False) -> Pair:
        """Draw windows of the text."""
        text = self._text[-VALIDATION_LENGTH:] if validation else self._text[:-VALIDATION_LENGTH]
        return text_windows(text, CONTEXT, count, random)


class ShapesTask(Task):
    """Classify images of shapes."""

    def model(self) -> nn.Module:
        """Create a residual network."""
        return residual_network(tuple(self.size.width << stage for stage in range(self.size.layers)))

    def batch(self, count: int, random: torch.Generator, *, validation: bool = False) -> Pair:
        """Draw new images; training and validation images never coincide."""
        return shape_images(count, random)


TASKS: dict[str, type[Task]] = {"transformer": TextTask, "resnet": ShapesTask}
SIZES = {
    ("transformer", "small"): Size(128, 2, 8, 2e-3, 256),
    ("transformer", "large"): Size(512, 3, 2, 3e-4, 64),
    ("resnet", "small"): Size(16, 3, 16, 2e-3, 256),
    ("resnet", "large"): Size(64, 4, 4, 1e-3, 128),
}
"""`small` for comparing losses, `large` (10 million parameters) for comparing step times."""
