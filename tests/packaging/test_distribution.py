from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path


def run_backend(hook: str, checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Call a hook of the build backend as pip does, in the environment of the tests."""
    code = f"from setuptools import build_meta; build_meta.{hook}('dist')"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=checkout,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def sdist_names(checkout: Path) -> set[str]:
    done = run_backend("build_sdist", checkout)
    assert done.returncode == 0, done.stderr
    (archive,) = (checkout / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as files:
        return {name.partition("/")[2] for name in files.getnames()}


def test_sdist_holds_every_source_and_the_texts_beside_them(checkout: Path) -> None:
    sources = {str(path.relative_to(checkout)) for path in checkout.rglob("*") if path.is_file()}
    assert sources <= sdist_names(checkout)


def test_sdist_holds_no_machine_code(checkout: Path) -> None:
    library = checkout / "mpi_gpucomp" / "device" / "lib" / "libgpucomp-baseline.so"
    library.parent.mkdir(exist_ok=True)
    library.touch()
    assert not [name for name in sdist_names(checkout) if name.endswith(".so")]


def test_build_without_a_compiler_says_what_to_install(checkout: Path) -> None:
    done = run_backend("build_wheel", checkout, CXX="no-such-compiler")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "building the host library: expected a C++17 compiler, got none at 'no-such-compiler'. "
        "Install g++ or clang, or name one in the environment variable CXX."
    )
