"""Reports: numbers in, one self-contained HTML page and PNG plots out. No model, no GPU, no torch.

``write_demo_report`` tells the story of one model (profile, plans, measurements); ``write_records_report`` draws
whatever a set of Records holds.
"""

from loopkv.report.demo import (
    DemoReport,
    FrontierPoint,
    RequestBytes,
    Sample,
    TaskScore,
    frontier_points,
    write_demo_report,
)
from loopkv.report.from_records import write_records_report

__all__ = [
    "DemoReport",
    "FrontierPoint",
    "RequestBytes",
    "Sample",
    "TaskScore",
    "frontier_points",
    "write_demo_report",
    "write_records_report",
]
