"""Benchmarks, each a short program: `python -m osu_bench.NAME`."""
