"""`python -m osu_bench NAME`: see `osu_bench/command.py`."""

import sys

from osu_bench.command import main

if __name__ == "__main__":
    sys.exit(main())
