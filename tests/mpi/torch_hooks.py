"""Run under mpirun: DDP with our hook, parameters from one rank to all, and broadcasts of what has changed.

torch_hooks.py BACKEND CHECK...     the functions below, with gloo or gpucomp as the default group
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpi_gpucomp import Communicator
from mpi_gpucomp.errors import GpucompError, SpecError
from mpi_gpucomp.torch import HookState, ParameterSync, broadcast_after_step, gpucomp_hook, sync_parameters

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
STEPS = 12


def start(backend: str) -> None:
    """Make the default group; for gloo let rank 0 serve a store on a port that is free, and tell the others."""
    if backend == "gpucomp":
        dist.init_process_group(backend)
        return
    port = None
    if RANK == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
    port = WORLD.bcast(port)
    if RANK != 0:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=RANK, world_size=SIZE)


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(96, 96), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(96, 4)).to(dtype)


def trained(state: HookState | None, steps: int = STEPS, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Train on data that differ from rank to rank, in small buckets, which DDP makes anew after the first step."""
    net = DistributedDataParallel(model(dtype), bucket_cap_mb=0.02)
    if state is not None:
        net.register_comm_hook(state, gpucomp_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(RANK)
    for _ in range(steps):
        x = torch.randn(16, 96, generator=random).to(dtype)
        optimizer.zero_grad()
        (net(x) - x[:, :4].sin()).square().mean().backward()
        optimizer.step()
    return net.module


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


def distance(one: nn.Module, other: nn.Module) -> float:
    return float((flat(one) - flat(other)).abs().max())


def check_same_everywhere(net: nn.Module) -> None:
    mine = flat(net).view(torch.uint8).numpy().tobytes()
    assert WORLD.bcast(mine) == mine, "replicas differ"


def lossless() -> None:
    plain = trained(None)
    for codec in ("none", "split", "auto"):
        ours = trained(HookState(codec=codec))
        check_same_everywhere(ours)
        assert distance(ours, plain) < 1e-6, codec
    half = trained(HookState(codec="split"), dtype=torch.bfloat16)
    check_same_everywhere(half)
    assert distance(half, trained(None, dtype=torch.bfloat16)) < 0.02


def feedback() -> None:
    """Lose most of each gradient to a coarse codec: only with feedback does the model come near the plain one."""
    plain, untrained = trained(None, 60), model()
    coarse = "bound:abs=2e-3"
    without = trained(HookState(codec=coarse, error_feedback=False), 60)
    with_feedback = trained(HookState(codec=coarse), 60)
    check_same_everywhere(with_feedback)
    check_same_everywhere(without)
    gap = [float((flat(net) - flat(plain)).norm()) for net in (untrained, without, with_feedback)]
    assert gap[2] < 0.25 * gap[1] < 0.25 * gap[0], gap


def warm_up() -> None:
    """As many warm-up steps as there are steps: nothing is lost."""
    plain = trained(None)
    assert distance(trained(HookState(codec="zfp:rate=3", warmup_steps=STEPS)), plain) < 1e-6
    short = HookState(codec="zfp:rate=3", warmup_steps=STEPS - 1)
    assert distance(trained(short), plain) > 1e-5
    assert short.step == STEPS


def roles() -> None:
    """Take the communicator's codec for gradients; for parameters a lossy one only if it is meant for them."""
    with Communicator(WORLD, "zfp:rate=8", roles={"gradients": "bound:abs=1e-3"}) as comm:
        state = HookState(comm)
        assert state.codec.spec == "bound:abs=0.001"
        net = trained(state)
        assert distance(net, trained(None)) > 1e-6
        for parameter in net.parameters():
            parameter.data.mul_(1 + RANK)
        expected = WORLD.bcast(flat(net).numpy().tobytes(), 1)
        sync_parameters(net, root=1, ranks=comm)
        assert flat(net).numpy().tobytes() == expected
    with Communicator(WORLD, roles={"parameters": "bound:abs=1e-2"}) as comm:
        assert HookState(comm).codec.spec == "auto"
        sync_parameters(net, root=1, ranks=comm)
        assert RANK == 1 or flat(net).numpy().tobytes() != expected
        assert np.abs(flat(net).numpy() - np.frombuffer(expected, np.float32)).max() <= 1e-2


def overflow() -> None:
    """Let an infinite gradient pass, as mixed precision makes them, and keep nothing of it."""
    net = DistributedDataParallel(nn.Linear(600, 64, bias=False))
    net.register_comm_hook(HookState(codec="zfp:rate=8"), gpucomp_hook)
    for scale in (float("inf"), 1.0, 1.0):
        net.zero_grad()
        (net(torch.ones(1, 600)) * scale).sum().backward()
        gradient = net.module.weight.grad
        assert gradient is not None
        assert bool(gradient.isfinite().all()) == (scale == 1.0)
    assert float((gradient - 1).abs().max()) < 0.1


def overlap() -> None:
    """Come to the last bucket of rank 0 before any other rank has begun: no bucket waits for the one before."""
    net = DistributedDataParallel(model(), bucket_cap_mb=0.02)
    futures = []

    def hook(state, bucket):
        if RANK and not futures:
            WORLD.recv(source=0)
        futures.append(gpucomp_hook(state, bucket))
        if RANK == 0 and bucket.is_last():
            assert not any(future.done() for future in futures)
            for rank in range(1, SIZE):
                WORLD.send(None, rank)
        return futures[-1]

    net.register_comm_hook(HookState(codec="split"), hook)
    for step in range(3):
        net(torch.ones(2, 96)).sum().backward()
        assert all(future.done() for future in futures)
        assert (len(futures) > 2) == (step > 0)  # DDP begins with a single bucket
        futures.clear()


def two_models() -> None:
    """Let the buckets of two models become ready in another order on each rank, in one backward."""
    nets, alone = ([DistributedDataParallel(model(), bucket_cap_mb=0.02) for _ in range(2)] for _ in range(2))
    for parameter in (*nets[1].parameters(), *alone[1].parameters()):
        parameter.data.mul_(2)
    for net in nets:
        net.register_comm_hook(HookState(codec="split"), gpucomp_hook)
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(RANK))
    for _ in range(3):
        for net in (*nets, *alone):
            net.zero_grad()
        losses = [net(x).square().mean() for net in (nets if RANK % 2 else nets[::-1])]
        (losses[0] + losses[1]).backward()
        for net, other in zip(nets, alone, strict=True):
            other(x).square().mean().backward()
            for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
                assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def failure() -> None:
    """Hear of one rank's mistake in backward, on all."""
    net = DistributedDataParallel(nn.Linear(400, 400))
    net.register_comm_hook(HookState(codec="split" if RANK else "none"), gpucomp_hook)
    try:
        net(torch.ones(2, 400)).sum().backward()
    except (GpucompError, RuntimeError) as error:
        assert "expected" in str(error) and "split" in str(error), error
    else:
        raise AssertionError("nobody noticed")


def refused() -> None:
    """Hear of groups that are not MPI's ranks, and of steps that there cannot be."""
    some = dist.new_group([0, 1])
    if RANK < 2:
        other = f"rank {RANK} of {SIZE}, as MPI has it, got rank {RANK} of 2. Start torch with MPI's ranks, or pass a "
        _expect(
            lambda: HookState(some),
            f"rank {RANK}: communicator of a torch group: expected {other}Communicator of the group's ranks.",
        )
    _expect(
        lambda: HookState(warmup_steps=-1),
        f"rank {RANK}: HookState: expected a number of warm-up steps, 0 or more, got -1. "
        "Pass 0 to compress from the first step on.",
    )


def _expect(call: Callable[[], object], text: str) -> None:
    try:
        call()
    except SpecError as error:
        assert str(error) == text, error
    else:
        raise AssertionError("nobody refused it")


def sync() -> None:
    """Compare every tensor with the root's, whatever its type, size and layout."""
    net = nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200), nn.Linear(200, 7).to(torch.bfloat16))
    net.register_buffer("turned", torch.randn(50, 70).t())
    net.register_buffer("empty", torch.empty(0, 3))
    net.register_buffer("few", torch.arange(5) + RANK)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=1 + RANK)
    expected = WORLD.bcast([tensor.clone() for tensor in net.state_dict().values()], SIZE - 1)
    for codec in (None, "split", "delta"):
        net.load_state_dict({k: v + (RANK != SIZE - 1) for k, v in net.state_dict().items()})
        sync_parameters(net, root=SIZE - 1, codec=codec)
        for ours, theirs in zip(net.state_dict().values(), expected, strict=True):
            assert torch.equal(ours, theirs), codec
    for exact_root in (False, True):
        net.load_state_dict({k: v + (RANK != SIZE - 1) for k, v in net.state_dict().items()})
        sync_parameters(net, root=SIZE - 1, codec="zfp:rate=12", exact_root=exact_root)
        several = WORLD.allgather([tensor.clone() for tensor in net.state_dict().values()])
        for ours, first, last, theirs in zip(net.state_dict().values(), several[0], several[-1], expected, strict=True):
            assert torch.equal(ours, last if RANK == SIZE - 1 else first)
            near = float((ours - theirs).abs().max()) if ours.numel() else 0
            assert near <= (0.1 if ours.is_floating_point() else 0)
        large = several[0][0], several[-1][0]
        assert torch.equal(*large) != exact_root
        net.load_state_dict(dict(zip(net.state_dict(), expected, strict=True)))


def after_step() -> None:
    """Only the root has gradients; the hook brings what it learns to all, and stops when it is removed."""
    for codec in ("split", "delta"):
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        handle = broadcast_after_step(optimizer, codec=codec)
        for step in range(5):
            optimizer.zero_grad()
            (net(torch.full((4, 96), float(RANK + step))).sum()).backward()
            optimizer.step()
            check_same_everywhere(net)
        handle.remove()
        net(torch.full((4, 96), float(RANK))).sum().backward()
        optimizer.step()
        assert len(set(WORLD.allgather(flat(net).numpy().tobytes()))) > 1


def any_order() -> None:
    """Several models' parameters at once, waited for in another order on each rank."""
    tensors = [[torch.full((5000 + 100 * n,), float(RANK + n)), torch.full((n + 1,), 1.0 * RANK)] for n in range(5)]
    syncs = [ParameterSync(several, root=n % SIZE, codec="split") for n, several in enumerate(tensors)]
    for turn in range(3):
        order = np.random.default_rng(RANK + turn).permutation(5)
        for n in order:
            syncs[n].start()
        for n in order[::-1]:
            syncs[n].wait()
    for n, several in enumerate(tensors):
        assert torch.equal(several[0], torch.full_like(several[0], n % SIZE + n))
        assert torch.equal(several[1], torch.full_like(several[1], n % SIZE))


def main() -> None:
    faulthandler.dump_traceback_later(120, exit=True)
    torch.set_num_threads(1)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    start(sys.argv[1])
    for name in sys.argv[2:]:
        globals()[name]()
        WORLD.Barrier()
        if RANK == 0:
            print(f"{name}: right on {SIZE} ranks", flush=True)
    dist.destroy_process_group()


main()
