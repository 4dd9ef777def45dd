"""The ways to store one cell's history. One table owns names, bits and groups; every byte count is derived from it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from loopkv.errors import UnsupportedError
from loopkv.policy import Policy

SCALE_BYTES = 2  # fp16 scale
ZERO_BYTES = 2  # fp16 zero point


@dataclass(frozen=True, slots=True)
class Option:
    """One way to store a cell's history.

    Args:
        name: as written in plans.
        bits: bits per code; None keeps the engine's exact dtype; 0 stores nothing.
        shares: the history read is the final loop's.
        rank: position in the table, which breaks ties between plans.
    """

    name: str
    bits: int | None
    shares: bool
    rank: int

    @property
    def coded(self) -> bool:
        """True where the cell owns quantized pages."""
        return self.bits is not None and self.bits > 0


BF16 = Option("bf16", bits=None, shares=False, rank=0)
INT4 = Option("int4", bits=4, shares=False, rank=1)
INT2 = Option("int2", bits=2, shares=False, rank=2)
SHARE = Option("share", bits=0, shares=True, rank=3)

OPTIONS: dict[str, Option] = {option.name: option for option in (BF16, INT4, INT2, SHARE)}


def get_option(name: str) -> Option:
    """The option called ``name``.

    Raises:
        UnsupportedError: unknown name; the nearest known one is suggested.
    """
    try:
        return OPTIONS[name]
    except (KeyError, TypeError):
        near = difflib.get_close_matches(str(name), OPTIONS, n=1, cutoff=0.4)
        raise UnsupportedError(
            "unknown storage option",
            got=repr(name)[:80],
            wanted=", ".join(OPTIONS),
            hint=f"did you mean {near[0]!r}?" if near else "see `loopkv plan --help`",
        ) from None


@dataclass(frozen=True, slots=True)
class CellBytes:
    """Byte sizes of one cell per history token. ``value_low_plane`` is what V precision skips for a cold token."""

    stored: int
    read: int
    value_low_plane: int = 0


def check_codable(head_dim: int, policy: Policy) -> None:
    """Refuse a head size that the codec's value groups do not divide."""
    if head_dim % policy.group:
        raise UnsupportedError(
            "head size", got=head_dim, wanted=f"a multiple of the value group {policy.group}", hint="use option bf16"
        )


def own_bytes(option: Option, kv_heads: int, head_dim: int, policy: Policy, exact_itemsize: int = 2) -> CellBytes:
    """Bytes per history token of a cell that owns its history (not ``share``). Paper appendix C.

    Keys carry one scale and zero per (kv head, channel) and page, values one per (token, kv head) and channel group.
    """
    if option.shares:
        raise ValueError("a shared cell reads what its source stores: use plan_bytes")
    elements = kv_heads * head_dim
    if option.bits is None:
        exact = 2 * elements * exact_itemsize
        return CellBytes(exact, exact)
    check_codable(head_dim, policy)
    codes = 2 * elements * option.bits // 8
    metadata = elements * (SCALE_BYTES + ZERO_BYTES)
    total = codes + metadata // policy.page_tokens + metadata // policy.group
    return CellBytes(total, total, elements * 2 // 8 if option.bits == 4 else 0)
