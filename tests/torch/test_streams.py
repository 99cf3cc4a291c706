"""What follows a wait is ordered behind a collective's copies, on stand-ins for torch's CUDA streams and futures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from mpi_gpucomp.torch.streams import current_streams, on_streams  # noqa: E402 - needs torch
from mpi_gpucomp.torch.work import CollectiveWork, OperationQueue, P2PWork  # noqa: E402 - needs torch

GPUS = torch.device("cuda", 0), torch.device("cuda", 1)


class Stream:
    """A stream that keeps what was queued, and sees what it waits for."""

    def __init__(self, device: Any = GPUS[0]) -> None:
        self.device, self.queued = device, []

    def record_event(self) -> tuple[str, ...]:
        return tuple(self.queued)

    def wait_event(self, event: tuple[str, ...]) -> None:
        self.queued += event


class GpuTensor(torch.Tensor):
    """A tensor that says it is on a GPU."""

    device = GPUS[0]


class SecondGpuTensor(torch.Tensor):
    """A tensor that says it is on another GPU."""

    device = GPUS[1]


class Future:
    """A future that keeps what its value is ordered behind: the current stream where it was set."""

    def __init__(self, devices: list[Any]) -> None:
        self.devices, self.value, self.behind = devices, None, ()

    def set_result(self, value: Any) -> None:
        self.value, self.behind = value, tuple(torch.cuda.current_stream(GPUS[0]).queued)


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Stream]:
    local = threading.local()

    def current(device: Any) -> Stream:
        return local.__dict__.setdefault(device, Stream(device))

    @contextmanager
    def use(stream: Stream) -> Any:
        before = current(stream.device)
        local.__dict__[stream.device] = stream
        yield
        local.__dict__[stream.device] = before

    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.futures, "Future", Future)
    return current


def tensor(kind: Any = GpuTensor) -> Any:
    return torch.Tensor._make_subclass(kind, torch.zeros(4))


@pytest.fixture
def queue() -> Any:
    made = OperationQueue("streams")
    yield made
    assert made.close(5.0)


def started(queue: OperationQueue, on: Stream, result: list[Any]) -> CollectiveWork:
    """Start a collective that divides its result on the current stream."""
    work = CollectiveWork("all_reduce", result, 5.0)

    def run() -> None:
        for one in result:
            torch.cuda.current_stream(one.device).queued.append("division")

    with torch.cuda.stream(on):
        return queue.run(work, run, inline=False, tensors=result)


def test_another_stream_that_waits_follows_the_division(queue: OperationQueue) -> None:
    work, waiter = started(queue, Stream(), [tensor()]), Stream()
    with torch.cuda.stream(waiter):
        assert work.wait()
    assert waiter.queued == ["division"]


def test_another_thread_that_waits_follows_the_division(queue: OperationQueue, streams: Any) -> None:
    work, seen = started(queue, Stream(), [tensor()]), []
    thread = threading.Thread(target=lambda: (work.wait(), seen.extend(streams(GPUS[0]).queued)))
    thread.start()
    thread.join()
    assert seen == ["division"]


@pytest.mark.parametrize("late", [False, True])
def test_a_future_follows_the_division(queue: OperationQueue, late: bool) -> None:
    work = started(queue, Stream(), [tensor()])
    if late:
        assert queue.drain(5.0)
    with torch.cuda.stream(Stream()):
        future = work.get_future()
    assert queue.drain(5.0)
    assert future.devices == [GPUS[0]]
    assert "division" in future.behind


def test_every_gpu_of_a_collective_is_followed(queue: OperationQueue, streams: Any) -> None:
    on, tensors = [Stream(device) for device in GPUS], [tensor(), tensor(SecondGpuTensor)]
    with on_streams(on):
        assert current_streams(tensors) == on
        work = started(queue, on[0], tensors)
    assert work.wait()
    assert [one.queued for one in on] == [["division"]] * 2
    assert [streams(device).queued for device in GPUS] == [["division"]] * 2


def test_a_wait_on_a_message_follows_the_copy_into_the_tensor(monkeypatch: pytest.MonkeyPatch, streams: Any) -> None:
    class Request:
        def Test(self, status: Any) -> bool:
            return True

    def copy_back(to: Any, source: Any) -> None:
        streams(GPUS[0]).queued.append("copy")

    monkeypatch.setattr("mpi_gpucomp.torch.work.copy_back", copy_back)
    work, poller, waiter = P2PWork("recv", Request(), tensor(), torch.zeros(4), 5.0), Stream(), Stream()
    with torch.cuda.stream(poller):
        assert work.is_completed()
    with torch.cuda.stream(waiter):
        assert work.wait()
    assert waiter.queued == ["copy"]
