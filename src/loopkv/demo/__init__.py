"""The demo: the whole flow on one model, from profile to served answers, with a report."""

from loopkv.demo.pipeline import DemoResult, DemoSettings, run_demo

__all__ = ["DemoResult", "DemoSettings", "run_demo"]
