"""The HTML report of results: tables and charts in one file that a browser opens offline."""

from osu_bench.report.page import page

__all__ = ["page"]
