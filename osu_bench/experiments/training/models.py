"""The models: a character-level transformer, and a residual network that classifies images of shapes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from osu_bench.experiments.training.data import CLASSES

__all__ = ["Transformer", "residual_network"]

HEAD_WIDTH = 64


class Transformer(nn.Module):
    """Predict the next character at each position."""

    def __init__(self, characters: int, length: int, width: int, layers: int) -> None:
        """Create a model for an alphabet of `characters` and texts of at most `length`."""
        super().__init__()
        self.token, self.position = nn.Embedding(characters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next character at each position."""
        positions = torch.arange(text.shape[1], device=text.device)
        logits: torch.Tensor = self.head(self.norm(self.blocks(self.token(text) + self.position(positions))))
        return logits


class _Block(nn.Module):
    """Causal self-attention and a feed-forward network, each with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block."""
        batch, length, width = x.shape
        qkv = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        output: torch.Tensor = x + self.feed_forward(self.second(x))
        return output


def residual_network(widths: tuple[int, ...]) -> nn.Sequential:
    """Create a residual network with one stage per width; each stage halves the resolution."""
    stages: list[nn.Module] = [nn.Conv2d(1, widths[0], 3, padding=1)]
    for before, width in zip(widths[:1] + widths, widths, strict=False):
        stages += [_Residual(before, width, stride=2), _Residual(width, width)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES))


class _Residual(nn.Module):
    """Two convolutions with a skip connection."""

    def __init__(self, before: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, width, 3, stride, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        # Group norm: batch norm would need the statistics of all ranks.
        self.norms = nn.ModuleList([nn.GroupNorm(8, width), nn.GroupNorm(8, width)])
        self.skip = nn.Conv2d(before, width, 1, stride) if (before, stride) != (width, 1) else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block."""
        output = self.norms[1](self.second(functional.relu(self.norms[0](self.first(x)))))
        return functional.relu(output + self.skip(x))
