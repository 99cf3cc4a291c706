"""Experiments: programs that answer one question each; `osu_bench NAME` runs them."""
