"""Run under mpirun: the DDP hook, and broadcasts of parameters.

torch_hooks.py BACKEND CHECK...     functions of this file, with gloo or gpucomp as the default group
"""

from __future__ import annotations

import faulthandler
import gc
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
from mpi_gpucomp.torch.backend import communicator_of
from mpi_gpucomp.torch.sync import _retired

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
STEPS = 12


def start(backend: str) -> None:
    """Create the default group; for gloo, rank 0 serves a store on a free port."""
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
    """Train on data that differ between ranks, in small buckets, which DDP rebuilds after the first step."""
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


def flatten(net: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


def distance(one: nn.Module, other: nn.Module) -> float:
    return float((flatten(one) - flatten(other)).abs().max())


def check_replicas(net: nn.Module) -> None:
    mine = flatten(net).view(torch.uint8).numpy().tobytes()
    assert WORLD.bcast(mine) == mine, "replicas differ"


def lossless() -> None:
    reference = trained(None)
    for codec in ("none", "split", "auto"):
        ours = trained(HookState(codec=codec))
        check_replicas(ours)
        assert distance(ours, reference) < 1e-6, codec
    half = trained(HookState(codec="split"), dtype=torch.bfloat16)
    check_replicas(half)
    assert distance(half, trained(None, dtype=torch.bfloat16)) < 0.02


def feedback() -> None:
    """Check that error feedback recovers the gradients lost to a coarse codec."""
    reference, untrained = trained(None, 60), model()
    coarse = "bound:abs=2e-3"
    without = trained(HookState(codec=coarse, error_feedback=False), 60)
    with_feedback = trained(HookState(codec=coarse), 60)
    check_replicas(with_feedback)
    check_replicas(without)
    gap = [float((flatten(net) - flatten(reference)).norm()) for net in (untrained, without, with_feedback)]
    assert gap[2] < 0.25 * gap[1] < 0.25 * gap[0], gap


def warm_up() -> None:
    """Check that warm-up steps are not compressed."""
    reference = trained(None)
    assert distance(trained(HookState(codec="zfp:rate=3", warmup_steps=STEPS)), reference) < 1e-6
    short = HookState(codec="zfp:rate=3", warmup_steps=STEPS - 1)
    assert distance(trained(short), reference) > 1e-5
    assert short.step == STEPS


def roles() -> None:
    """Check the default codecs: by role, and for parameters a lossy one only by role."""
    with Communicator(WORLD, "zfp:rate=8", roles={"gradients": "bound:abs=1e-3"}) as comm:
        state = HookState(comm)
        assert state.codec.spec == "bound:abs=0.001"
        net = trained(state)
        assert distance(net, trained(None)) > 1e-6
        for parameter in net.parameters():
            parameter.data.mul_(1 + RANK)
        expected = WORLD.bcast(flatten(net).numpy().tobytes(), 1)
        sync_parameters(net, root=1, ranks=comm)
        assert flatten(net).numpy().tobytes() == expected
    with Communicator(WORLD, roles={"parameters": "bound:abs=1e-2"}) as comm:
        assert HookState(comm).codec.spec == "auto"
        sync_parameters(net, root=1, ranks=comm)
        assert RANK == 1 or flatten(net).numpy().tobytes() != expected
        assert np.abs(flatten(net).numpy() - np.frombuffer(expected, np.float32)).max() <= 1e-2


def overflow() -> None:
    """Check that an infinite gradient, as in mixed precision, leaves no residual."""
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
    """Check that rank 0 starts all buckets before another rank starts its first."""
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
        assert (len(futures) > 2) == (step > 0)  # DDP starts with a single bucket
        futures.clear()


def two_models() -> None:
    """Check buckets of two models that become ready in different orders on the ranks."""
    nets, references = ([DistributedDataParallel(model(), bucket_cap_mb=0.02) for _ in range(2)] for _ in range(2))
    for parameter in (*nets[1].parameters(), *references[1].parameters()):
        parameter.data.mul_(2)
    for net in nets:
        net.register_comm_hook(HookState(codec="split"), gpucomp_hook)
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(RANK))
    for _ in range(3):
        for net in (*nets, *references):
            net.zero_grad()
        losses = [net(x).square().mean() for net in (nets if RANK % 2 else nets[::-1])]
        (losses[0] + losses[1]).backward()
        for net, other in zip(nets, references, strict=True):
            other(x).square().mean().backward()
            for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
                assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def failure() -> None:
    """Check that an error of one rank is raised by backward on all ranks."""
    net = DistributedDataParallel(nn.Linear(400, 400))
    net.register_comm_hook(HookState(codec="split" if RANK else "none"), gpucomp_hook)
    try:
        net(torch.ones(2, 400)).sum().backward()
    except (GpucompError, RuntimeError) as error:
        assert "expected" in str(error) and "split" in str(error), error
    else:
        raise AssertionError("no error")


def invalid_arguments() -> None:
    """Check the errors of invalid arguments."""
    pair = dist.new_group([0, 1])
    if RANK < 2:
        _expect(
            lambda: HookState(pair),
            f"rank {RANK}: communicator of a torch group: expected a group of all MPI ranks, in which this one is rank "
            f"{RANK} of {SIZE}, got rank {RANK} of 2. Initialise torch with the MPI ranks, or pass a Communicator of "
            "the ranks of the group.",
        )
    _expect(
        lambda: HookState(warmup_steps=-1),
        f"rank {RANK}: HookState: expected warmup_steps of 0 or more, got -1. "
        "Pass 0 to compress from the first step on.",
    )
    _expect(
        lambda: HookState("bound:rel=1e-3"),
        "ranks: expected a Communicator, an MPI communicator, a torch group or None, got 'bound:rel=1e-3'. "
        "Pass a codec by its keyword, codec=.",
    )
    for call, topic in ((sync_parameters, "sync_parameters"), (ParameterSync, "ParameterSync")):
        _expect(
            lambda call=call: call({"weight": torch.ones(2), "step": 3}),
            f"rank {RANK}: {topic}: expected a module, a state_dict of tensors, or tensors, got int at 'step'. "
            "Pass the tensors alone; send other objects with torch.distributed.broadcast_object_list.",
        )
    for argument, ranks, got in (
        (nn.Linear(2, 2).state_dict(), None, "an object of type OrderedDict"),
        (nn.Linear(2, 2), WORLD, "an MPI communicator"),
    ):
        _expect(
            lambda argument=argument, ranks=ranks: sync_parameters(argument, codec="delta", ranks=ranks),
            f"rank {RANK}: sync_parameters with codec delta: expected a module, and a Communicator or a torch group, "
            f"to which the last version belongs, got {got}. Keep a Communicator, or a ParameterSync of the tensors.",
        )


def sub_group() -> None:
    """Check that HookState takes the group of the model, and numbers states by group."""
    pair = dist.new_group([0, 1])
    if RANK < 2 and dist.get_backend() != "gpucomp":
        net = DistributedDataParallel(nn.Linear(4, 1), process_group=pair)
        _expect(
            lambda: net.register_comm_hook(HookState(), gpucomp_hook),
            f"rank {RANK}: communicator of a torch group: expected a group of all MPI ranks, in which this one is "
            f"rank {RANK} of {SIZE}, got rank {RANK} of 2. Initialise torch with the MPI ranks, or pass a "
            "Communicator of the ranks of the group.",
        )
    elif RANK < 2:
        net, state = DistributedDataParallel(nn.Linear(4, 1, bias=False), process_group=pair), HookState(codec="split")
        net.register_comm_hook(state, gpucomp_hook)
        net(torch.full((1, 4), 1.0 + RANK)).sum().backward()
        assert net.module.weight.grad.eq(1.5).all(), net.module.weight.grad
        alone = dist.new_group([RANK], use_local_synchronization=True)
        _expect(
            lambda: DistributedDataParallel(net.module, process_group=alone).register_comm_hook(state, gpucomp_hook),
            "rank 0: register_comm_hook: expected models of one process group to share a HookState, "
            "got models of two groups. Make a HookState for each group.",
        )
    everyone = DistributedDataParallel(nn.Linear(4, 1, bias=False))
    everyone.register_comm_hook(HookState(codec="split"), gpucomp_hook)
    everyone(torch.full((1, 4), 1.0 + RANK)).sum().backward()
    assert everyone.module.weight.grad.eq((SIZE + 1) / 2).all()


def _expect(call: Callable[[], object], text: str) -> None:
    try:
        call()
    except SpecError as error:
        assert str(error) == text, error
    else:
        raise AssertionError("no error")


def sync() -> None:
    """Check sync_parameters on tensors of several types, sizes and layouts."""
    net = nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200), nn.Linear(200, 7).to(torch.bfloat16))
    net.register_buffer("transposed", torch.randn(50, 70).t())
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
            error = float((ours - theirs).abs().max()) if ours.numel() else 0
            assert error <= (0.1 if ours.is_floating_point() else 0)
        large = several[0][0], several[-1][0]
        assert torch.equal(*large) != exact_root
        net.load_state_dict(dict(zip(net.state_dict(), expected, strict=True)))


def repeated_deltas() -> None:
    """Check that a second call of sync_parameters with codec delta sends less, also after tensors have moved."""
    net, communicator = nn.Linear(400, 300), communicator_of(None)
    whole = 4 * 400 * 300

    def synchronised(value: float) -> int:
        net.weight.data[0] = value + RANK
        before = communicator.stats().bytes_received
        sync_parameters(net, codec="delta")
        assert net.weight[0].eq(value).all()
        check_replicas(net)
        return communicator.stats().bytes_received - before

    received = [synchronised(float(n)) for n in range(3)]
    assert RANK == 0 or (received[0] > whole / 2 and max(received[1:]) < whole / 10), received
    if RANK == 1:  # one rank has the tensors elsewhere
        net.weight.data = net.weight.data.clone()
    received = [synchronised(float(n)) for n in range(3, 6)]
    assert RANK == 0 or (received[0] > whole / 2 and max(received[1:]) < whole / 10), received
    sync_parameters(net, root=1, codec="delta")
    other = nn.Linear(400, 300)
    net = None
    sync_parameters(other, codec="delta")
    check_replicas(other)
    del other
    gc.collect()
    assert len(_retired) == 1  # those of the first module were freed by the call for the second
    sync_parameters(nn.Linear(2, 2), codec="delta")


def state_dicts() -> None:
    """Check that a state_dict, a module, or one tensor may be passed."""
    for way in (sync_parameters, lambda state: ParameterSync(state)()):
        net = model()
        for parameter in net.parameters():
            parameter.data.add_(RANK)
        way(net.state_dict())
        check_replicas(net)
    net = nn.BatchNorm1d(3)
    net.running_mean.fill_(RANK + 1)
    ParameterSync(net)()
    assert net.running_mean.eq(1).all()
    tensor = torch.full((2, 5), 1.0 + RANK)
    ParameterSync(tensor)()
    assert tensor.eq(1).all()


def after_step() -> None:
    """Check the broadcast after each optimizer step, until its handle is removed."""
    for codec in ("split", "delta"):
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        handle = broadcast_after_step(optimizer, codec=codec)
        for step in range(5):
            optimizer.zero_grad()
            (net(torch.full((4, 96), float(RANK + step))).sum()).backward()
            optimizer.step()
            check_replicas(net)
        handle.remove()
        net(torch.full((4, 96), float(RANK))).sum().backward()
        optimizer.step()
        assert len(set(WORLD.allgather(flatten(net).numpy().tobytes()))) > 1


def any_order() -> None:
    """Start and wait for several syncs in a different order on each rank."""
    tensors = [[torch.full((5000 + 100 * n,), float(RANK + n)), torch.full((n + 1,), 1.0 * RANK)] for n in range(5)]
    syncs = [ParameterSync(several, root=n % SIZE, codec="split") for n, several in enumerate(tensors)]
    for repetition in range(3):
        order = np.random.default_rng(RANK + repetition).permutation(5)
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
            print(f"{name}: passed on {SIZE} ranks", flush=True)
    dist.destroy_process_group()


main()
