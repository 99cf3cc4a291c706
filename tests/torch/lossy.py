"""Lossy policies: replicas that are equal bit for bit, exact roots on request, codecs by role; run under mpirun."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mpi_gpucomp.torch import Options

CODECS = "zfp:rate=8", "bound:rel=1e-3", "cast:bf16"
COUNT = 300_001
"""Elements: several chunks, and a last one that is shorter."""


def weights(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make this rank's own weights."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.normal(0.0, 0.02, (COUNT,), generator=generator).to(dtype)


def alike(tensor: torch.Tensor) -> bool:
    """Say whether all ranks have the same bits, by a group without a codec."""
    copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, tensor)
    bits = [copy.view(torch.uint8) for copy in copies]
    return all(torch.equal(bits[0], other) for other in bits)


def replicas(codec: str, dtype: torch.dtype) -> None:
    """Broadcast from every rank in turn: equal everywhere, changed, and not by much."""
    group = dist.new_group(pg_options=Options(codec=codec, chunk=1 << 18))
    for root in range(dist.get_world_size()):
        for in_background in (False, True):
            mine = weights(dtype)
            work = dist.broadcast(mine, root, group, async_op=in_background)
            if work is not None:
                work.wait()
            assert alike(mine), f"{codec}: replicas differ, root {root}"
            if dist.get_rank() == root:
                error = (mine - weights(dtype)).abs().max().item()
                assert 0 < error < 0.02, f"{codec}: {error}"
    gathered = torch.empty(COUNT * dist.get_world_size(), dtype=dtype)
    dist.all_gather_single(gathered, weights(dtype), group=group)
    assert alike(gathered), f"{codec}: what was gathered differs"
    total = weights(dtype)
    dist.all_reduce(total, group=group)
    assert alike(total), f"{codec}: sums differ"
    dist.destroy_process_group(group)


def exact_root() -> None:
    """Let the root keep what it had."""
    group = dist.new_group(pg_options=Options(codec="zfp:rate=8", exact_root=True))
    mine = weights()
    dist.broadcast(mine, 0, group)
    assert not alike(mine)
    if dist.get_rank() == 0:
        assert torch.equal(mine, weights())


def by_role() -> None:
    """Send gradients lossy and everything else exactly, and leave what is small or of whole numbers alone."""
    group = dist.new_group(pg_options=Options(codec="split", roles={"gradients": "bound:abs=1e-3"}))
    ranks = dist.get_world_size()
    mine = weights()
    dist.broadcast(mine, ranks - 1, group)
    assert alike(mine)
    if dist.get_rank() == ranks - 1:
        assert torch.equal(mine, weights())
    exact, sums = weights(), weights()
    dist.all_reduce(exact)
    dist.all_reduce(sums, group=group)
    assert alike(sums) and 0 < (sums - exact).abs().max() < 1e-3 * (ranks + 1)
    few = weights()[:1000].clone()
    expected = few.clone()
    dist.all_reduce(expected)
    dist.all_reduce(few, group=group)
    assert torch.equal(few, expected)
    numbers = torch.arange(COUNT)
    dist.all_reduce(numbers, group=group)
    assert torch.equal(numbers, torch.arange(COUNT) * ranks)


def main() -> None:
    """Run everything."""
    dist.init_process_group("gpucomp", init_method="mpi://")
    for codec in CODECS:
        replicas(codec, torch.float32)
    replicas("zfp:rate=10", torch.bfloat16)
    replicas("bound:rel=1e-2", torch.float64)
    exact_root()
    by_role()
    dist.destroy_process_group()
    print("all is well")


if __name__ == "__main__":
    main()
