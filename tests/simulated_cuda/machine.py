"""The simulated CUDA machine as tests see it: settings, findings, injected failures, counts and the model's clock.

`machine().path` is the library that a program opens in place of libcuda.so.1. Settings are a string such as
`seed=3,devices=2`, also read from the environment variable `MPI_GPUCOMP_SIMULATED_CUDA` by each process:

| setting | meaning |
|---|---|
| `seed` | of the order of queued work; a process adds its rank |
| `devices`, `gpu` | the number of GPUs, and their kind: A100 (default) or H100 |
| `capacity` | bytes of memory of a GPU, by default those of its kind |
| `starve` | 0: no stream has to wait while others can run |
| `eager` | 1: all work runs when it is queued |
| `ptx` | interpret kernels from their PTX in grids of up to so many blocks; 0 (default): none |
| `lockstep` | 1: lanes that diverge in an interpreted kernel meet again as soon as they can |
| `compare` | 1: each interpreted kernel has to write the bytes that the host's kernel writes |
| `capability` | the compute capability that the GPUs say they have, such as 75 or 120 |
| `track` | 0: hazards are not looked for |
| `protect` | 0: host memory that unfinished work accesses is not protected |
| `background` | milliseconds without a call after which queued work runs by itself; 0: never |
| `inject` | a failure, as for `inject` |
| `launch_us`, `copy_us`, `event_us`, `wake_us` | what a call costs the host on the model's clock |
"""

from __future__ import annotations

import ctypes
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from .build import library

__all__ = ["SETTINGS", "CudaError", "Machine", "machine"]

SETTINGS = "MPI_GPUCOMP_SIMULATED_CUDA"
"""The environment variable; if it is set, `cuda:N` in tests is a simulated GPU."""


class CudaError(Exception):
    """A call of the driver that failed; `code` is CUDA's."""

    def __init__(self, call: str, code: int, name: str, text: str) -> None:
        """Describe a failure."""
        super().__init__(f"{call}: {name}: {text}")
        self.code, self.name, self.text = code, name, text


class Machine:
    """The simulated machine of this process."""

    def __init__(self) -> None:
        """Build and load the library."""
        self.path: Path = library()
        self.generation = 0
        """Counts the starts of the machine: handles of an earlier one are invalid."""
        self.driver: Any = ctypes.CDLL(str(self.path))
        names = ("configure", "findings", "inject", "counts", "fault", "profiles", "interpreted")
        self._text = {name: getattr(self.driver, f"simcuda_{name}") for name in names}
        for function in self._text.values():
            function.restype = ctypes.c_char_p
        self._microseconds = self.driver.simcuda_model_microseconds
        self._microseconds.restype = ctypes.c_double

    def call(self, function: str, *args: Any) -> None:
        """Call a function of the driver; raise a CudaError if it fails."""
        if code := getattr(self.driver, function)(*args):
            raise self.error(function, code)

    def error(self, function: str, code: int) -> CudaError:
        """Return the error that a code of the driver stands for."""
        texts = [ctypes.c_char_p(), ctypes.c_char_p()]
        self.driver.cuGetErrorName(code, ctypes.byref(texts[0]))
        self.driver.cuGetErrorString(code, ctypes.byref(texts[1]))
        name, text = ((one.value or b"?").decode() for one in texts)
        return CudaError(function, code, name, text)

    def _checked(self, name: str, value: str) -> None:
        wrong = self._text[name](value.encode()).decode()
        if wrong:
            raise ValueError(f"simulated CUDA, {name} {value!r}: {wrong}")

    def configure(self, settings: str = "") -> None:
        """Start again with these settings: all handles and memory of the program become invalid."""
        self._checked("configure", settings)
        self.generation += 1

    def inject(self, failure: str) -> None:
        """Plan a failure: KIND[:device=D][;n=N][;kernel=NAME].

        KIND is illegal_address or launch_failed (of the N-th launch from now on), out_of_memory (of the N-th
        allocation), unavailable or ecc (at the N-th call).
        """
        self._checked("inject", failure)

    @property
    def findings(self) -> list[str]:
        """What was found since the start or the last `clear`."""
        return str(self._text["findings"]().decode()).splitlines()

    def clear(self) -> None:
        """Forget the findings."""
        self.driver.simcuda_clear_findings()

    def check(self) -> None:
        """Raise an AssertionError that lists the findings, if there are any, and forget them."""
        found = self.findings
        self.clear()
        assert not found, "the simulated CUDA machine found:\n" + "\n".join(found)

    def repair(self) -> None:
        """Make failed devices work again, which no real one does, and drop planned failures."""
        self.driver.simcuda_repair()

    def mark(self) -> None:
        """Take what exists now for no leak."""
        self.driver.simcuda_mark()

    def leaks(self, *, everything: bool = False) -> int:
        """Add what exists since the mark (or at all) to the findings; return how much it is."""
        return int(self.driver.simcuda_leaks(int(everything)))

    def expect_devices(self, *ordinals: int) -> None:
        """Make a context on any other device a finding."""
        self.driver.simcuda_expect_devices(sum(1 << ordinal for ordinal in ordinals))

    def host_access(self, address: int, nbytes: int, what: str, *, write: bool = False) -> None:
        """Say that the host accesses memory now, which is a finding if unfinished work does."""
        self.driver.simcuda_host_access(
            ctypes.c_uint64(address), ctypes.c_size_t(nbytes), int(write), ctypes.c_char_p(what.encode())
        )

    def counts(self, device: int = 0) -> Counter[str]:
        """Return the counts of a device since they were reset."""
        return Counter(json.loads(self._text["counts"]())["devices"][str(device)])

    @property
    def profiles(self) -> dict[str, Counter[str]]:
        """What each interpreted kernel did since the counts were reset: instructions, bytes, sectors of memory."""
        return {name: Counter(counts) for name, counts in json.loads(self._text["profiles"]()).items()}

    @property
    def interpreted(self) -> set[str]:
        """The kernels whose PTX has been compared with the host's kernels in this process."""
        return set(self._text["interpreted"]().decode().split())

    def stream_counts(self, handle: int) -> Counter[str]:
        """Return the counts of a stream since they were reset."""
        return Counter(json.loads(self._text["counts"]())["streams"][str(handle)])

    def reset_counts(self) -> None:
        """Start counting, and the model's clock, from zero."""
        self.driver.simcuda_reset_counts()

    @property
    def model_microseconds(self) -> float:
        """Time on the model's clock since the counts were reset: a model, not a measurement."""
        return float(self._microseconds())

    def fault(self, device: int = 0) -> str:
        """Return why the context of a device failed, or an empty string."""
        return str(self._text["fault"](device).decode())

    def step(self) -> bool:
        """Run one queued operation that can run; return False if there is none."""
        return bool(self.driver.simcuda_step())

    def drain(self) -> None:
        """Run all queued work that can run."""
        self.driver.simcuda_drain()

    def peek(self, address: int, nbytes: int) -> bytes:
        """Read device memory without any order, as a debugger does."""
        to = ctypes.create_string_buffer(nbytes)
        assert self.driver.simcuda_peek(ctypes.c_uint64(address), ctypes.c_size_t(nbytes), to)
        return to.raw


@cache
def machine() -> Machine:
    """Return the machine; builds and loads it on the first call."""
    return Machine()
