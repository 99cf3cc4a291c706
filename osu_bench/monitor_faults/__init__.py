"""Faults on a cluster of one machine, and when the monitor names each: a slow link, a slow host, a stall, a dead rank.

sudo python -m osu_bench.monitor_faults                  # every fault, a few minutes
sudo python -m osu_bench.monitor_faults --clean 180      # none, for so many seconds
python -m osu_bench.monitor_faults --here                # on this machine, faults that need no network

Four hosts broadcast again and again. A fault is made, what the monitor says is read from its log, and the fault is
taken back. A row says whom it named and after how long; an alarm that nobody has made is reported too.
"""
