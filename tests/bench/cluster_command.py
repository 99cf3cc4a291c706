"""The command line with the command `cluster` alone."""

from __future__ import annotations

import argparse
import sys

from mpi_gpucomp.errors import GpucompError
from osu_bench.cluster.command import add


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="osu_bench")
    add(parser.add_subparsers(required=True))
    args = parser.parse_args()
    try:
        code: int = args.run(args)
    except GpucompError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
