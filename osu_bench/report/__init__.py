"""The report of results: one page with tables and charts that needs nothing but a browser."""

from __future__ import annotations

from osu_bench.report.command import add
from osu_bench.report.page import page

__all__ = ["add", "page"]
