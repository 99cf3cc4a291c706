"""The command line as a module: `python -m mpi_gpucomp`."""

import sys

from mpi_gpucomp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
