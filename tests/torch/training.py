"""Compare loss curves of DDP, ZeRO, FSDP and others with those of gloo on the same data; run under mpirun.

    mpirun -n 4 python tests/torch/training.py [NAME...]

On two ranks the curves are bitwise equal, because a sum of two values does not depend on their order.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import mpi_gpucomp.torch

Group = Any
STEPS = 4


class Net(nn.Module):
    """A model of two layers, and a third one that is optional."""

    def __init__(self) -> None:
        """Initialise the weights from the global seed."""
        super().__init__()
        self.first, self.second, self.optional = nn.Linear(8, 32), nn.Linear(32, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor, *, optional: bool = False) -> torch.Tensor:
        """Return four outputs per row."""
        y: torch.Tensor = self.second(torch.relu(self.norm(self.first(x))))
        return self.optional(y) if optional else y


def net(seed: int = 0) -> Net:
    """Create a model from a seed."""
    torch.manual_seed(seed)
    return Net()


def batches(count: int = STEPS) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this rank's batches."""
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    for _ in range(count):
        yield torch.randn(16, 8, generator=generator), torch.randn(16, 4, generator=generator)


def train(model: Any, optimizer: Any, **forward: Any) -> list[float]:
    """Train for some steps; return the losses and the sums of the weights."""
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x, **forward), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, *weights(model)]


def weights(model: Any) -> list[float]:
    """Return the sum of each parameter, DTensors included."""
    parameters = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [p.detach().double().sum().item() for p in parameters]


def sgd(model: Any) -> torch.optim.SGD:
    """Create the optimizer used by all tests."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def ddp(group: Group) -> list[float]:
    """Use several buckets; ranks start with different weights."""
    model = DistributedDataParallel(net(dist.get_rank()), process_group=group, bucket_cap_mb=0.001)
    return train(model, sgd(model), optional=True)


def ddp_unused(group: Group) -> list[float]:
    """Train with unused parameters."""
    model = DistributedDataParallel(net(), process_group=group, find_unused_parameters=True)
    return train(model, sgd(model))


def ddp_static(group: Group) -> list[float]:
    """Train with a static graph."""
    model = DistributedDataParallel(net(), process_group=group, static_graph=True, gradient_as_bucket_view=True)
    return train(model, sgd(model), optional=True)


def ddp_no_sync(group: Group) -> list[float]:
    """Accumulate the gradients of two batches per step."""
    model = DistributedDataParallel(net(), process_group=group)
    optimizer, losses = sgd(model), []
    for step, (x, y) in enumerate(batches()):
        with model.no_sync() if step % 2 == 0 else nullcontext():
            loss = nn.functional.mse_loss(model(x, optional=True), y)
            loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, *weights(model)]


def ddp_join(group: Group) -> list[float]:
    """Train with different numbers of batches per rank."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 4), process_group=group)
    optimizer = sgd(model)
    with Join([model]):
        for x, y in batches(STEPS + 2 * dist.get_rank()):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return weights(model)


def ddp_hooks(group: Group) -> list[float]:
    """Use the hooks of torch: half precision, and PowerSGD, which starts operations in callbacks."""
    losses = []
    state = PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
    for argument, hook in ((group, default_hooks.fp16_compress_hook), (state, powerSGD_hook)):
        model = DistributedDataParallel(net(), process_group=group)
        model.register_comm_hook(argument, hook)
        losses += train(model, sgd(model), optional=True)
    return losses


def zero(group: Group) -> list[float]:
    """Shard the optimizer; each rank broadcasts the parameters that it updates."""
    losses = []
    for view in (False, True):
        model = DistributedDataParallel(net(), process_group=group)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.SGD,
            process_group=group,
            parameters_as_bucket_view=view,
            lr=0.1,
        )
        losses += train(model, optimizer, optional=True)
    return losses


def fsdp(group: Group) -> list[float]:
    """Shard the parameters."""
    mesh = DeviceMesh.from_group(group, "cpu")
    model = net()
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(model, sgd(model), optional=True)


def tensor_parallel(group: Group) -> list[float]:
    """Split layers by columns and rows."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer, losses = sgd(model), []
    generator = torch.Generator().manual_seed(7)  # all ranks see the same batch
    for _ in range(STEPS):
        x, y = torch.randn(16, 8, generator=generator), torch.randn(16, 4, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, *weights(model)]


def dtensor(group: Group) -> list[float]:
    """Redistribute tensors."""
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(0)
    whole = torch.randn(12, 5)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    by_columns = sharded.redistribute(mesh, [Shard(1)])
    replicated = by_columns.redistribute(mesh, [Replicate()])
    assert torch.equal(replicated.to_local(), whole)
    product = (sharded.t() @ sharded).full_tensor()
    assert torch.allclose(product, whole.t() @ whole, atol=1e-5)
    return [product.double().sum().item()]


def compiled(group: Group) -> list[float]:
    """Compile the model, which torch splits at its buckets."""
    torch._dynamo.reset()
    model = DistributedDataParallel(net(), process_group=group)
    return train(torch.compile(model, backend="aot_eager"), sgd(model), optional=True)


COMPARED_WITH_GLOO: tuple[Callable[[Group], list[float]], ...] = (
    ddp,
    ddp_unused,
    ddp_static,
    ddp_no_sync,
    ddp_join,
    ddp_hooks,
    zero,
    fsdp,
    tensor_parallel,
    dtensor,
    compiled,
)


def zero_overlapped() -> None:
    """Overlap ZeRO with backward, which torch does not support on gloo; compare with no overlap."""
    reference = DistributedDataParallel(net(), gradient_as_bucket_view=True, static_graph=True)
    model = DistributedDataParallel(net(), gradient_as_bucket_view=True, static_graph=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    model.register_comm_hook(None, hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer))
    other = torch.optim.SGD(reference.parameters(), lr=0.1)
    for x, y in batches(3):  # parameters are not updated before DDP has rebuilt its buckets
        nn.functional.mse_loss(model(x, optional=True), y).backward()
    for parameter in model.parameters():
        parameter.grad = None
    reference.load_state_dict(copy.deepcopy(model.state_dict()))
    for x, y in batches():
        for net_ in (model, reference):
            net_.zero_grad()
            nn.functional.mse_loss(net_(x, optional=True), y).backward()
        other.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def meshes_and_checkpoints() -> None:
    """Train with shards on one dimension of a mesh and replicas on the other; save and load."""
    ranks = dist.get_world_size()
    if ranks % 2:
        return
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicas", "shards"))
    assert mesh["shards"].size() == ranks // 2 and dist.get_backend(mesh.get_group("replicas")) == "gpucomp"
    model = fully_shard(net(), mesh=mesh)
    train(model, sgd(model), optional=True)
    path: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch uses what it has deprecated
        checkpoint.save({"model": model.state_dict()}, checkpoint_id=path[0])
        loaded = fully_shard(net(99), mesh=mesh)
        state = {"model": loaded.state_dict()}
        checkpoint.load(state, checkpoint_id=path[0])
    loaded.load_state_dict(state["model"])
    assert weights(loaded) == weights(model)


def sync_batch_norm() -> None:
    """Run the collectives of SyncBatchNorm; its kernels, and so the module itself, need a GPU."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(net(), dist.group.WORLD)
    assert isinstance(model.norm, nn.SyncBatchNorm) and model.norm.process_group is dist.group.WORLD
    ranks, rank = dist.get_world_size(), dist.get_rank()
    statistics = torch.cat([torch.full((32,), float(rank)), torch.full((32,), 1.0), torch.full((1,), 16.0)])
    gathered = torch.empty(ranks * 65)
    dist.all_gather_single(gathered, statistics, group=model.norm.process_group)
    means, _, counts = gathered.view(ranks, 65).split([32, 32, 1], dim=1)
    assert means[:, 0].tolist() == list(range(ranks)) and counts.sum() == 16 * ranks
    gradients = torch.full((64,), float(rank))
    dist.all_reduce(gradients, group=model.norm.process_group)
    assert gradients.eq(ranks * (ranks - 1) / 2).all()


def lossy() -> None:
    """Use lossy codecs for gradients and parameters: replicas stay equal, and losses decrease as before."""
    options = mpi_gpucomp.torch.Options(
        roles={"parameters": "cast:bf16", "gradients": "bound:rel=1e-3"}, passthrough_bytes=0
    )
    group = dist.new_group(pg_options=options)
    model = DistributedDataParallel(net(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, process_group=group, parameters_as_bucket_view=True, lr=0.1
    )
    losses = train(model, optimizer, optional=True)
    exact = DistributedDataParallel(net())
    expected = train(exact, torch.optim.SGD(exact.parameters(), lr=0.1), optional=True)
    assert torch.allclose(torch.tensor(losses[:STEPS]), torch.tensor(expected[:STEPS]), rtol=0.05)
    for parameter in model.parameters():
        copies = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, parameter.detach())
        assert all(torch.equal(copies[0], other) for other in copies)


WITHOUT_GLOO = (zero_overlapped, meshes_and_checkpoints, sync_batch_norm, lossy)


def main(names: list[str]) -> None:
    """Run the named checks, or all."""
    dist.init_process_group("gpucomp")
    torch.set_num_threads(1)
    ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    for check in COMPARED_WITH_GLOO:
        if not names or check.__name__ in names:
            actual, expected = check(ours), check(gloo)
            if dist.get_world_size() <= 2:
                assert actual == expected, f"{check.__name__}: {actual}, expected {expected}"
            tensors = torch.tensor(actual), torch.tensor(expected)
            torch.testing.assert_close(*tensors, rtol=1e-4, atol=1e-4, msg=check.__name__)
            if dist.get_rank() == 0:
                print(f"{check.__name__}: equal to gloo", flush=True)
    for check_alone in WITHOUT_GLOO:
        if not names or check_alone.__name__ in names:
            check_alone()
            if dist.get_rank() == 0:
                print(f"{check_alone.__name__}: passed", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
