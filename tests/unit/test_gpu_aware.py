"""Detection of GPU-aware MPI: each source of evidence, with libraries built by the C compiler."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mpi_gpucomp.errors import SpecError
from mpi_gpucomp.transport.gpu_aware import (
    GpuAwareness,
    by_kinds,
    by_library,
    by_setting,
    by_transport,
    cuda_aware,
    selected_pml,
)

COMPILER = shlex.split(os.environ.get("CC", "cc"))

VERSIONS = {  # version strings, and the names derived from them
    "open": ("Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11\0", "Open MPI v5.0.11"),
    "mpich": ("MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\n", "MPICH Version: 5.0.2"),
    "cray": (
        "MPI VERSION    : CRAY MPICH version 8.1.25.17 (ANL base 3.4a2)\nMPI BUILD INFO : Sun Feb 26 15:15 2023\n",
        "MPI VERSION : CRAY MPICH version 8.1.25.17 (ANL base 3.4a2)",
    ),
    "mvapich2": ("MVAPICH2 Version      :\t2.3.7\nMVAPICH2 Device       :\tch3:mrail\n", "MVAPICH2 Version : 2.3.7"),
    "mvapich": ("MVAPICH Version:\t4.0\nMVAPICH Device:\tch4:ofi\n", "MVAPICH Version: 4.0"),
    "unnamed": ("\0", "MPI"),
}
OPEN_MPI = VERSIONS["open"][0]

QUERY = "int MPIX_Query_cuda_support(void) {{ return {}; }}"
GPU_QUERY = "int MPIX_GPU_query_support(int type, int *is) {{ *is = type == {}; return {}; }}"
BUILT = "_Bool opal_built_with_cuda_support = {};"
SOURCES = {
    "nothing": "int MPI_Init(void) { return 0; }",
    "query:yes": QUERY.format(1),
    "query:no": QUERY.format(0),
    "query:unknown": QUERY.format(-1),
    "built:yes": BUILT.format(1),
    "built:no": BUILT.format(0),
    "built:yes+query:no": BUILT.format(1) + QUERY.format(0),
    "gpu:cuda": GPU_QUERY.format(0, 0),
    "gpu:hip": GPU_QUERY.format(2, 0),
    "gpu:fails": GPU_QUERY.format(0, 12),
    "gpu:cuda+query:no": GPU_QUERY.format(0, 0) + QUERY.format(0),
}
QUERIED, GPU_QUERIED = "MPIX_Query_cuda_support() reports", "MPIX_GPU_query_support() reports"
STAGED = "no query function, so messages are staged through pinned memory"

Build = Callable[..., str]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Return a function that compiles C into a shared library and returns its path."""
    if shutil.which(COMPILER[0]) is None:
        pytest.skip(f"no C compiler at {COMPILER[0]}")

    def build(source: str, *options: str, name: str = "libmpi.so") -> str:
        (tmp_path / "mpi.c").write_text(source)
        command = [*COMPILER, "-shared", "-fPIC", "-o", str(tmp_path / name), str(tmp_path / "mpi.c"), *options]
        subprocess.run(command, check=True, timeout=60)
        return str(tmp_path / name)

    return build


def test_the_setting_takes_precedence_over_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI_GPUCOMP_CUDA_AWARE", "1")
    assert cuda_aware() == GpuAwareness(True, "MPI_GPUCOMP_CUDA_AWARE is 1")
    monkeypatch.setenv("MPI_GPUCOMP_CUDA_AWARE", "0")
    assert cuda_aware() == GpuAwareness(False, "MPI_GPUCOMP_CUDA_AWARE is 0")


@pytest.mark.parametrize("environment", [{}, {"MPI_GPUCOMP_CUDA_AWARE": ""}])
def test_without_a_setting_the_result_is_open(environment: dict[str, str]) -> None:
    assert by_setting(environment) is None


@pytest.mark.parametrize("value", ["yes", "2", "01", " 1", "true"])
def test_an_invalid_setting_is_an_error(value: str) -> None:
    with pytest.raises(SpecError) as caught:
        by_setting({"MPI_GPUCOMP_CUDA_AWARE": value})
    assert str(caught.value) == (
        f"environment variable MPI_GPUCOMP_CUDA_AWARE: expected 0 or 1, got '{value}'. "
        "Set 1 if MPI is GPU-aware, 0 to stage through pinned memory, or unset it to detect it."
    )


@pytest.mark.parametrize("kinds", ["mpi,system,cuda", "cuda:device", "system, CUDA:host:device,mpi:alloc_mem"])
def test_memory_kinds_with_gpu_memory_prove_support(kinds: str) -> None:
    assert by_kinds(kinds) == GpuAwareness(True, f"mpi_memory_alloc_kinds is {kinds}")


@pytest.mark.parametrize("kinds", [None, "", "mpi,system", "rocm:device", "cuda:host", "cuda:managed", "cudax,xcuda"])
def test_memory_kinds_without_gpu_memory_prove_nothing(kinds: str | None) -> None:
    assert by_kinds(kinds) is None


@pytest.mark.parametrize(
    ("version", "source", "setting", "aware", "why"),
    [
        ("open", "query:yes", "", True, f"{QUERIED} yes"),
        ("open", "query:no", "", False, f"{QUERIED} no"),
        ("open", "query:unknown", "", False, f"{QUERIED} no"),
        ("open", "built:yes", "", True, "opal_built_with_cuda_support reports yes"),
        ("open", "built:no", "", False, "opal_built_with_cuda_support reports no"),
        ("open", "built:yes+query:no", "", False, f"{QUERIED} no"),
        ("open", "nothing", "", False, STAGED),
        ("open", "nothing", "MPICH_GPU_SUPPORT_ENABLED=1", False, STAGED),
        ("mpich", "gpu:cuda", "", True, f"{GPU_QUERIED} yes"),
        ("mpich", "gpu:hip", "", False, f"{GPU_QUERIED} no"),
        ("mpich", "gpu:fails", "", False, "MPIX_GPU_query_support() fails with error code 12"),
        ("mpich", "gpu:cuda+query:no", "", True, f"{GPU_QUERIED} yes"),
        ("mpich", "gpu:cuda", "MPIR_CVAR_ENABLE_GPU=1", True, f"{GPU_QUERIED} yes"),
        ("mpich", "gpu:cuda", "MPIR_CVAR_ENABLE_GPU=", True, f"{GPU_QUERIED} yes"),
        ("mpich", "gpu:cuda", "MPIR_CVAR_ENABLE_GPU=0", False, "MPIR_CVAR_ENABLE_GPU is not 1"),
        ("mpich", "nothing", "MPIR_CVAR_ENABLE_GPU=1", False, STAGED),
        ("cray", "nothing", "MPICH_GPU_SUPPORT_ENABLED=1", True, "MPICH_GPU_SUPPORT_ENABLED is 1"),
        ("cray", "nothing", "MPICH_GPU_SUPPORT_ENABLED=0", False, "MPICH_GPU_SUPPORT_ENABLED is not 1"),
        ("cray", "gpu:cuda", "", False, "MPICH_GPU_SUPPORT_ENABLED is not 1"),
        ("cray", "gpu:hip", "MPICH_GPU_SUPPORT_ENABLED=1", False, f"{GPU_QUERIED} no"),
        ("mvapich2", "nothing", "MV2_USE_CUDA=1", True, "MV2_USE_CUDA is 1"),
        ("mvapich2", "query:yes", "", False, "MV2_USE_CUDA is not 1"),
        ("mvapich2", "query:yes", "MV2_USE_CUDA=1", True, f"{QUERIED} yes"),
        ("mvapich2", "query:no", "MV2_USE_CUDA=1", False, f"{QUERIED} no"),
        ("mvapich", "nothing", "MVP_ENABLE_GPU=1", True, "MVP_ENABLE_GPU is 1"),
        ("mvapich", "nothing", "MV2_USE_CUDA=1", False, STAGED),
        ("mvapich", "gpu:cuda", "", True, f"{GPU_QUERIED} yes"),
        ("mvapich", "gpu:cuda", "MVP_ENABLE_GPU=0", False, "MVP_ENABLE_GPU is not 1"),
        ("unnamed", "nothing", "", False, STAGED),
    ],
)
def test_a_library_is_queried_unless_its_variable_disables_gpu_memory(
    build: Build, version: str, source: str, setting: str, aware: bool, why: str
) -> None:
    text, name = VERSIONS[version]
    environment = dict([setting.split("=")]) if setting else {}
    assert by_library(build(SOURCES[source]), text, environment) == GpuAwareness(aware, f"{name}: {why}")


def test_a_linked_library_is_queried(build: Build, tmp_path: Path) -> None:
    build(SOURCES["query:yes"], name="libinner.so")
    options = ["-Wl,--no-as-needed", f"-L{tmp_path}", "-linner", f"-Wl,-rpath,{tmp_path}"]
    outer = build(SOURCES["nothing"], *options, name="libouter.so")
    assert by_library(outer, OPEN_MPI, {}) == GpuAwareness(
        True, "Open MPI v5.0.11: MPIX_Query_cuda_support() reports yes"
    )


def test_a_library_that_does_not_load_has_no_support(tmp_path: Path) -> None:
    odd = tmp_path / "libmpi.so"
    odd.write_text("no library")
    missing = tmp_path / "none.so"
    start = "Open MPI v5.0.11: the library does not load: "
    assert by_library(str(odd), OPEN_MPI, {}) == GpuAwareness(False, f"{start}{odd}: file too short")
    why = f"{start}{missing}: cannot open shared object file: No such file or directory"
    assert by_library(str(missing), OPEN_MPI, {}) == GpuAwareness(False, why)


def test_without_a_path_the_program_itself_is_queried() -> None:
    assert by_library(None, OPEN_MPI, {}) == GpuAwareness(False, f"Open MPI v5.0.11: {STAGED}")


YES, NO = GpuAwareness(True, "it says so"), GpuAwareness(False, "it does not")
WITH_CUDA = "7f00-7f01 r-xp 00000000 08:01 1 /usr/lib/ucx/libuct_cuda.so.0.0.0\n"


@pytest.mark.parametrize(
    ("pml", "mapped", "transports", "aware", "why"),
    [
        ("ob1", "", "", True, "it says so"),
        (None, "", "", True, "it says so"),
        ("ucx", WITH_CUDA, "", True, "it says so; UCX has loaded libuct_cuda"),
        ("ucx", WITH_CUDA, "rc,cuda_copy,sm", True, "it says so; UCX has loaded libuct_cuda"),
        ("ucx", WITH_CUDA, "all", True, "it says so; UCX has loaded libuct_cuda"),
        ("ucx", WITH_CUDA, "^tcp", True, "it says so; UCX has loaded libuct_cuda"),
        ("ucx", WITH_CUDA, "rc,sm", False, "it says so, but UCX_TLS=rc,sm leaves out CUDA"),
        ("ucx", WITH_CUDA, "^cuda", False, "it says so, but UCX_TLS=^cuda leaves out CUDA"),
        (
            "ucx",
            "",
            "",
            False,
            "it says so, but its messages go through UCX, which has not loaded libuct_cuda",
        ),
    ],
)
def test_an_open_mpi_on_ucx_needs_a_ucx_with_cuda(
    pml: str | None, mapped: str, transports: str, aware: bool, why: str
) -> None:
    environment = {"UCX_TLS": transports} if transports else {}
    assert by_transport(YES, pml, mapped, environment) == GpuAwareness(aware, why)
    assert by_transport(NO, pml, mapped, environment) == NO


COMPONENT = """
struct {{
    int mca[3]; char project[16]; int version[3]; char type[32]; int type_version[3]; char name[64]; char rest[99];
}} mca_pml_base_selected_component = {{ {{2, 1, 0}}, "ompi", {{0, 5, 11}}, "pml", {{2, 1, 0}}, "{}" }};
"""


@pytest.mark.parametrize("name", ["ob1", "ucx", "cm"])
def test_the_component_that_moves_messages_is_read_from_open_mpi(build: Build, name: str) -> None:
    assert selected_pml(build(COMPONENT.format(name), name=f"lib{name}.so")) == name


def test_other_libraries_have_no_such_component(build: Build) -> None:
    assert selected_pml(build(SOURCES["gpu:cuda"])) is None
