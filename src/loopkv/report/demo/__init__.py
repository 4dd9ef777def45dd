"""The demo report: one model from profile to plans to answers, on one page and in one summary file.

``contents`` holds what the page says, ``page`` puts it together and writes it; every other module is one section.
"""

from loopkv.report.demo.contents import (
    DemoReport,
    FrontierPoint,
    RequestBytes,
    Sample,
    TaskScore,
    frontier_points,
    log_correlation,
)
from loopkv.report.demo.page import demo_page, write_demo_report

__all__ = [
    "DemoReport",
    "FrontierPoint",
    "RequestBytes",
    "Sample",
    "TaskScore",
    "demo_page",
    "frontier_points",
    "log_correlation",
    "write_demo_report",
]
