"""Tensors on GPUs: the operations of training, in the caller's stream; run under mpirun."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mpi_gpucomp.torch import Options


def main() -> None:
    """Run all checks; ranks may share GPUs."""
    dist.init_process_group("gpucomp")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    for count in (10, 1 << 20):
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            sums = torch.full((count,), rank + 1.0, device=device)
            work = dist.all_reduce(sums, async_op=True)
            work.wait()
            assert sums.eq(ranks * (ranks + 1) / 2).all()
            assert work.get_future().value()[0] is sums
        tensor = torch.full((count,), float(rank), device=device)
        dist.broadcast(tensor, ranks - 1)
        assert tensor.eq(ranks - 1).all()
        whole = torch.empty(count * ranks, device=device)
        dist.all_gather_single(whole, torch.full((count,), float(rank), device=device))
        assert whole.view(ranks, count)[:, 0].tolist() == list(range(ranks))
    group = dist.new_group(pg_options=Options(codec="zfp:rate=16"))
    weights = torch.randn(1 << 20, device=device)
    dist.broadcast(weights, 0, group)
    copies = [torch.empty_like(weights) for _ in range(ranks)]
    dist.all_gather(copies, weights)
    assert all(torch.equal(copies[0], other) for other in copies)
    model = DistributedDataParallel(torch.nn.Linear(64, 64).to(device), device_ids=[device.index])
    model(torch.randn(8, 64, device=device)).sum().backward()
    dist.destroy_process_group()
    print("passed")


if __name__ == "__main__":
    main()
