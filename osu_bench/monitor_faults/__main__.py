"""Run by `python -m osu_bench.monitor_faults`."""

import sys

from osu_bench.monitor_faults.command import main

sys.exit(main())
