"""Lossy codecs: bitwise equal replicas, exact roots, codecs by role; run under mpirun."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mpi_gpucomp.torch import Options

CODECS = "zfp:rate=8", "bound:rel=1e-3", "cast:bf16"
COUNT = 300_001
"""Elements of a tensor: several chunks, the last one shorter."""


def weights(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return weights that differ between ranks."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.normal(0.0, 0.02, (COUNT,), generator=generator).to(dtype)


def replicated(tensor: torch.Tensor) -> bool:
    """Return True if all ranks hold the same bits."""
    copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, tensor)
    bits = [copy.view(torch.uint8) for copy in copies]
    return all(torch.equal(bits[0], other) for other in bits)


def replicas(codec: str, dtype: torch.dtype) -> None:
    """Check that lossy collectives leave all ranks with equal values, close to the exact ones."""
    group = dist.new_group(pg_options=Options(codec=codec, chunk=1 << 18))
    for root in range(dist.get_world_size()):
        for async_op in (False, True):
            tensor = weights(dtype)
            work = dist.broadcast(tensor, root, group, async_op=async_op)
            if work is not None:
                work.wait()
            assert replicated(tensor), f"{codec}: replicas differ, root {root}"
            if dist.get_rank() == root:
                error = (tensor - weights(dtype)).abs().max().item()
                assert 0 < error < 0.02, f"{codec}: {error}"
    gathered = torch.empty(COUNT * dist.get_world_size(), dtype=dtype)
    dist.all_gather_single(gathered, weights(dtype), group=group)
    assert replicated(gathered), f"{codec}: gathered tensors differ"
    total = weights(dtype)
    dist.all_reduce(total, group=group)
    assert replicated(total), f"{codec}: sums differ"
    dist.destroy_process_group(group)


def exact_root() -> None:
    """Check that the root keeps its exact values on request."""
    group = dist.new_group(pg_options=Options(codec="zfp:rate=8", exact_root=True))
    tensor = weights()
    dist.broadcast(tensor, 0, group)
    assert not replicated(tensor)
    if dist.get_rank() == 0:
        assert torch.equal(tensor, weights())


def by_role() -> None:
    """Check that only gradients are lossy, and neither short tensors nor integers."""
    group = dist.new_group(pg_options=Options(codec="split", roles={"gradients": "bound:abs=1e-3"}))
    ranks = dist.get_world_size()
    tensor = weights()
    dist.broadcast(tensor, ranks - 1, group)
    assert replicated(tensor)
    if dist.get_rank() == ranks - 1:
        assert torch.equal(tensor, weights())
    exact, sums = weights(), weights()
    dist.all_reduce(exact)
    dist.all_reduce(sums, group=group)
    assert replicated(sums) and 0 < (sums - exact).abs().max() < 1e-3 * (ranks + 1)
    short = weights()[:1000].clone()
    expected = short.clone()
    dist.all_reduce(expected)
    dist.all_reduce(short, group=group)
    assert torch.equal(short, expected)
    integers = torch.arange(COUNT)
    dist.all_reduce(integers, group=group)
    assert torch.equal(integers, torch.arange(COUNT) * ranks)


def main() -> None:
    """Run all checks."""
    dist.init_process_group("gpucomp", init_method="mpi://")
    for codec in CODECS:
        replicas(codec, torch.float32)
    replicas("zfp:rate=10", torch.bfloat16)
    replicas("bound:rel=1e-2", torch.float64)
    exact_root()
    by_role()
    dist.destroy_process_group()
    print("passed")


if __name__ == "__main__":
    main()
