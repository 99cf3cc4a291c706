"""Builds the simulated CUDA machine: its sources, and the kernels with the compiler's race instrumentation.

The result is cached by content in `MPI_GPUCOMP_SIMULATED_CUDA_CACHE`, or in a directory of this user's below the
temporary one. `python -m tests.simulated_cuda.build` prints the path of the library.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mpi_gpucomp.device.build import kernels_directory

__all__ = ["CACHE", "kernel_layouts", "library"]

HERE = Path(__file__).resolve().parent
CACHE = "MPI_GPUCOMP_SIMULATED_CUDA_CACHE"
SOURCE_FLAGS = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra", "-Werror"]
KERNEL_FLAGS = [
    *("-std=c++17", "-O1", "-fPIC", "-fno-exceptions", "-fno-rtti", "-Wno-psabi", "-Wno-unknown-pragmas"),
    # For the same bytes as those of the host library.
    *("-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing"),
    # Every access calls a function of the machine; the instrumentation's own library is not linked.
    "-fsanitize=thread",
]
_ENTRY = re.compile(r'visibility\("default"\)\)\) void (\w+)\(i64 first, i64 last, ([^{]*)\)\s*\{')


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "c++"))


def _run(*arguments: str) -> str:
    done = subprocess.run([*_compiler(), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:6000]
    return done.stdout


def _digest(files: list[Path], flags: list[str]) -> str:
    digest = hashlib.sha256(repr((_compiler(), flags)).encode())
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _cache() -> Path:
    default = Path(tempfile.gettempdir()) / f"mpi_gpucomp-simulated-cuda-{os.getuid()}"
    directory = Path(os.environ.get(CACHE, default))
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def kernel_layouts(source: Path) -> dict[str, str]:
    """Return, for each kernel of a family, the kind of each argument: r (pointer to const), w (pointer), q or d."""
    text = _run("-E", "-P", "-x", "c++", "-std=c++17", f"-I{kernels_directory()}", str(source))
    layouts = {}
    for name, arguments in _ENTRY.findall(" ".join(text.split())):
        kinds = ""
        for argument in arguments.split(","):
            words = argument.split()
            kinds += (
                ("r" if words[0] == "const" else "w")
                if "*" in argument
                else {"i64": "q", "u64": "q", "double": "d"}[words[0]]
            )
        layouts[name] = kinds
    return layouts


def _table(families: list[Path]) -> str:
    """Return C++ that registers every kernel when the library is loaded."""
    layouts = {source.stem: kernel_layouts(source) for source in families}
    names = [name for kernels in layouts.values() for name in kernels]
    declarations = "\n".join(f"void {name}(long long, long long);" for name in names)
    calls = "\n".join(
        f'    simcuda_add_kernel("{family}", "{name}", (void *){name}, "{layout}");'
        for family, kernels in layouts.items()
        for name, layout in kernels.items()
    )
    return (
        'extern "C" {\nvoid simcuda_add_kernel(const char *, const char *, void *, const char *);\n'
        f"{declarations}\n}}\n[[gnu::constructor]] static void add_kernels() {{\n{calls}\n}}\n"
    )


def _built(target: Path, *arguments: str) -> str:
    """Compile to a target that is written atomically, unless it exists."""
    if not target.exists():
        part = target.with_name(f"{target.name}.{os.getpid()}")
        _run(*arguments, "-o", str(part))
        part.replace(target)
    return str(target)


def library() -> Path:
    """Return the path of the machine's library; compile what is missing, one job per core."""
    cache, kernels = _cache(), kernels_directory()
    headers = sorted(kernels.glob("*.h"))
    families = [*sorted(kernels.glob("*.cu")), *sorted((HERE / "kernels").glob("*.cu"))]
    units, own_headers = sorted((HERE / "src").glob("*.cpp")), sorted((HERE / "src").glob("*.h"))
    everything = [*headers, *families, *units, *own_headers, Path(__file__)]
    target = cache / f"libsimcuda-{_digest(everything, SOURCE_FLAGS + KERNEL_FLAGS)}.so"
    if target.exists():
        return target

    def kernel(source: Path) -> str:
        part = cache / f"{source.stem}-{_digest([source, *headers], KERNEL_FLAGS)}.o"
        return _built(part, *KERNEL_FLAGS, f"-I{kernels}", "-x", "c++", "-c", str(source))

    def unit(source: Path) -> str:
        part = cache / f"{source.stem}-{_digest([source, *own_headers], SOURCE_FLAGS)}.o"
        return _built(part, *SOURCE_FLAGS, "-c", str(source))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as jobs:
        objects = [jobs.submit(kernel, source) for source in families] + [jobs.submit(unit, source) for source in units]
        parts = [job.result() for job in objects]
    with tempfile.NamedTemporaryFile("w", suffix=".cpp") as table:
        table.write(_table(families))
        table.flush()
        made = target.with_name(f"{target.name}.{os.getpid()}")
        _run(*SOURCE_FLAGS, "-shared", table.name, *parts, "-o", str(made), "-ldl")
    made.replace(target)
    return target


if __name__ == "__main__":
    print(library())
