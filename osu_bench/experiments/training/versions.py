"""Compression ratio of successive model versions: `osu_bench training_versions`.

Runs in one process on the whole model, in float32 and bfloat16. `split` encodes a version on its own, `delta` encodes
its difference from the version one step before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mpi_gpucomp.cli.command import table
from mpi_gpucomp.codec import get_codec
from mpi_gpucomp.codec.delta import Delta
from mpi_gpucomp.device import as_buffer, get_device
from osu_bench.arguments import CommandParser
from osu_bench.experiments.training.task import SIZES, TASKS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mpi_gpucomp.codec import Codec
    from mpi_gpucomp.device import Buffer

__all__ = ["main", "ratio", "versions"]

HEADER = ("step", "type", "split", "delta")


def versions(
    model: str, size: str, steps: Sequence[int], rate: float | None = None
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Train a model; for each of `steps` yield its number and the parameters before and after it."""
    torch.manual_seed(1)
    task, random = TASKS[model](SIZES[model, size]), torch.Generator().manual_seed(1)
    net = task.model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate or task.size.learning_rate)
    for step in range(max(steps) + 1):
        before = _flat(net) if step in steps else None
        optimizer.zero_grad()
        task.loss(net, *task.batch(4 * task.size.batch, random)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if before is not None:
            yield step, before, _flat(net)


def _flat(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


def ratio(before: torch.Tensor, after: torch.Tensor, codec: str) -> float:
    """Return the compression ratio of `after`; with codec `delta`, of its difference from `before`."""
    values, base = as_buffer(after), as_buffer(before)
    device = get_device("host")
    with device.alloc(base.nbytes) as copy:
        stream = device.stream()
        stream.copy(copy.address, base.address, base.nbytes)
        stream.synchronize()
        encoded = _encoded_bytes(Delta(values, copy) if codec == "delta" else get_codec(codec), values)
        stream.close()
        return values.nbytes / encoded


def _encoded_bytes(codec: Codec, values: Buffer) -> int:
    device = get_device("host")
    stream = device.stream()
    with device.alloc(codec.max_encoded(values.count, values.dtype)) as encoded:
        nbytes = codec.encode(values, encoded, stream).result()
    stream.close()
    return values.nbytes if nbytes is None else nbytes


EXAMPLE = "osu_bench training_versions --steps 2 20 100"


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table of compression ratios."""
    parser = CommandParser("osu_bench training_versions", "Compression ratios of successive model versions.", EXAMPLE)
    parser.add_argument("--model", choices=TASKS, default="transformer", help="(default transformer)")
    parser.add_argument("--size", choices=("small", "large"), default="small", help="(default small)")
    parser.add_argument("--rate", type=float, help="learning rate (default: that of the task)")
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[2, 20, 100], help="steps to compare (default 2 20 100)"
    )
    args = parser.parse_args(argv)
    rows = []
    for step, before, after in versions(args.model, args.size, args.steps, args.rate):
        for dtype in (torch.float32, torch.bfloat16):
            pair = before.to(dtype), after.to(dtype)
            ratios = [f"{ratio(*pair, codec):.2f}" for codec in ("split", "delta")]
            rows.append((str(step), str(dtype).removeprefix("torch."), *ratios))
    print(table(HEADER, rows))


if __name__ == "__main__":
    main()
