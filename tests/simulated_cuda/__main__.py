"""Runs a program on the simulated CUDA machine: `python -m tests.simulated_cuda program.py arguments`.

Under mpirun each rank has a machine of its own. At the end of the program its findings are printed, and make the exit
status 70. Without a program, prints the path of the library; `counts` prints the table of counts.py.
"""

from __future__ import annotations

import os
import runpy
import sys

from .cupy_standin import install
from .machine import machine

FOUND = 70


def main() -> int:
    """Run the program; return the exit status."""
    if len(sys.argv) < 2:
        print(machine().path)
        return 0
    if sys.argv[1] == "counts":
        from .counts import main as print_counts  # changes the settings

        return print_counts()
    install()
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        machine().drain()
        for finding in machine().findings:
            print(f"simulated CUDA: {finding}", file=sys.stderr)
    return FOUND if machine().findings else 0


if __name__ == "__main__":
    sys.exit(main())
