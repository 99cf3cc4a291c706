"""The one build step that setup.cfg cannot describe: the host library and the kernel texts, put beside the package."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

PACKAGE = Path("mpi_gpucomp")
KERNELS = Path("kernels")
CORE = PACKAGE / "core" / "src"


class BuildHost(Command):
    """Compiles the host library and the core, and puts the kernel texts into the package."""

    description = "compile the host library and the core"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []
    editable_mode = False

    def initialize_options(self) -> None:
        """Leave the place of the build to the build command."""
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        """Build where the Python files go."""
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        """Compile into the build tree, or in place for an editable install, which reads kernels/ where it is."""
        # By path: nothing of the package can be imported before it is installed.
        builder = runpy.run_path(str(PACKAGE / "device" / "build.py"))
        builder["build"](KERNELS, self._package() / "device" / "lib")
        builder["build_core"](CORE, self._package() / "device" / "lib")
        if not self.editable_mode:
            shutil.rmtree(self._package() / "kernels", ignore_errors=True)
            shutil.copytree(KERNELS, self._package() / "kernels")

    def get_source_files(self) -> list[str]:
        """Name the sources, which so reach the source distribution."""
        return [str(path) for folder in (KERNELS, CORE) for path in sorted(folder.iterdir())]

    def _package(self) -> Path:
        return PACKAGE if self.editable_mode else Path(str(self.build_lib)) / PACKAGE


class Build(build):
    """Builds the Python files, then the host library."""

    sub_commands: ClassVar = [*build.sub_commands, ("build_host", None)]


class PlatformWheel(bdist_wheel):
    """Tags the wheel for this platform and every Python 3: the library is loaded with ctypes, and knows no Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag with the Python version left open."""
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    """A distribution that belongs to one platform although setuptools knows of no extension module."""

    def has_ext_modules(self) -> bool:
        """Say yes: the host library is machine code."""
        return True


if __name__ == "__main__":
    setup(
        distclass=PlatformDistribution,
        cmdclass={"build": Build, "build_host": BuildHost, "bdist_wheel": PlatformWheel},
    )
