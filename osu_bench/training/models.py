"""The models of the examples: a transformer that predicts letters, and a residual network that tells drawings apart."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from osu_bench.training.data import CLASSES

__all__ = ["Transformer", "residual_network"]

WIDTH_OF_HEAD = 64


class Transformer(nn.Module):
    """Predicts the next letter of each place from those before it."""

    def __init__(self, letters: int, length: int, width: int, layers: int) -> None:
        """Make one for an alphabet of so many letters and texts of at most `length`."""
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return scores for the letter that follows each place."""
        places = torch.arange(text.shape[1], device=text.device)
        scores: torch.Tensor = self.head(self.norm(self.blocks(self.letter(text) + self.place(places))))
        return scores


class _Block(nn.Module):
    """Attention to what came before, then a network at each place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // WIDTH_OF_HEAD
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what both find."""
        several, length, width = x.shape
        parts = self.attend(self.first(x)).view(several, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.join(found.transpose(1, 2).reshape(several, length, width))
        added: torch.Tensor = x + self.think(self.second(x))
        return added


def residual_network(widths: tuple[int, ...]) -> nn.Sequential:
    """Make a residual network for drawings: a stage for each width, each with half the pixels of the one before."""
    stages: list[nn.Module] = [nn.Conv2d(1, widths[0], 3, padding=1)]
    for before, width in zip(widths[:1] + widths, widths, strict=False):
        stages += [_Residual(before, width, stride=2), _Residual(width, width)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES))


class _Residual(nn.Module):
    """Two convolutions, and a way past them."""

    def __init__(self, before: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, width, 3, stride, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        # Norms of groups, not of batches: those would need the statistics of all ranks.
        self.norms = nn.ModuleList([nn.GroupNorm(8, width), nn.GroupNorm(8, width)])
        self.past = nn.Conv2d(before, width, 1, stride) if (before, stride) != (width, 1) else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the convolutions find."""
        found = self.norms[1](self.second(functional.relu(self.norms[0](self.first(x)))))
        return functional.relu(found + self.past(x))
