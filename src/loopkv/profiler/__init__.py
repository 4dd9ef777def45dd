"""Damage of cells and of plans, measured in fp32 on documents."""

from loopkv.profiler.documents import Document, Selection, load_documents, min_document_tokens
from loopkv.profiler.measuring import PlanMeasurement, measure
from loopkv.profiler.own_documents import own_documents, read_prompts
from loopkv.profiler.profiling import profile
from loopkv.profiler.thresholds import TauSweep, tau

__all__ = [
    "Document",
    "PlanMeasurement",
    "Selection",
    "TauSweep",
    "load_documents",
    "measure",
    "min_document_tokens",
    "own_documents",
    "profile",
    "read_prompts",
    "tau",
]
