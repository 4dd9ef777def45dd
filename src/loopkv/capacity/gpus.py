"""Memory and effective bandwidth of a few GPUs, each constant with its source."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass

from loopkv.errors import LoopKVError, UnsupportedError

GIB = 1 << 30
REFERENCE_CELLS = 96  # cells of Ouro-1.4B, on which every t_fix below was fitted


@dataclass(frozen=True, slots=True)
class Gpu:
    """What eq. 1 needs to know about a GPU.

    Args:
        name: as on the command line.
        memory_bytes: what CUDA reports as total memory.
        bandwidth_bytes_s: BW, effective bytes per second of a whole decode step (below the datasheet's).
        t_fix_s: seconds of a step of ``REFERENCE_CELLS`` cells that do not scale with bytes.
        source: where bandwidth and t_fix come from, for print.
        datasheet_bytes_s: bandwidth of the memory by its datasheet, which no step can exceed; None where unknown.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_s: float
    t_fix_s: float
    source: str
    datasheet_bytes_s: float | None = None

    def __post_init__(self) -> None:
        for field, value, positive in (
            ("memory", self.memory_bytes, True),
            ("bandwidth", self.bandwidth_bytes_s, True),
            ("t_fix", self.t_fix_s, False),
        ):
            if not math.isfinite(value) or value < 0 or (positive and value == 0):
                raise LoopKVError(
                    f"GPU {self.name}: {field}", got=value, wanted=f"a finite number {'> 0' if positive else '>= 0'}"
                )


# The paper's fit on an RTX PRO 6000 (section 2.2, footnote 3): BW = 1.29 TB/s of the datasheet's 1.792 TB/s, t_fix =
# 6.84 ms. GPUs without a fit of their own take that fraction of their datasheet bandwidth and that t_fix.
_PAPER_T_FIX_S = 6.84e-3
_PAPER_FRACTION = 1.29 / 1.792
_ASSUMED = "not fitted: {peak} TB/s (datasheet) x 0.72 and t_fix 6.84 ms, as the paper fits on an RTX PRO 6000"


def _assumed(name: str, memory_gib: float, peak_tb_s: float) -> Gpu:
    bandwidth = peak_tb_s * 1e12 * _PAPER_FRACTION
    source = _ASSUMED.format(peak=peak_tb_s)
    return Gpu(name, round(memory_gib * GIB), bandwidth, _PAPER_T_FIX_S, source, peak_tb_s * 1e12)


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        # Stock vLLM's rows (BF16, Ouro-1.4B, 8K to 32K) of results/decode.jsonl, as `loopkv simulate --fit` fits them
        # (docs/benchmarks.md, Prediction). Memory: CUDA's. Datasheet: 4.8 TB/s.
        Gpu(
            "H200",
            round(139.8 * GIB),
            3.94e12,
            4.32e-3,
            "fitted to decode steps of stock vLLM 0.26, BF16, Ouro-1.4B (results/decode.jsonl)",
            4.8e12,
        ),
        # Memory: 96 GB (datasheet), of which CUDA reports 95.0 GiB. Datasheet: 1.792 TB/s.
        Gpu("RTX-PRO-6000", 95 * GIB, 1.29e12, _PAPER_T_FIX_S, "the paper's fit (section 2.2), Ouro-1.4B", 1.792e12),
        # Datasheets: H100 SXM 80 GB, 3.35 TB/s; A100 SXM 80 GB, 2.039 TB/s; RTX PRO 4500 Blackwell 32 GB, 0.896 TB/s;
        # L40S 48 GB, 0.864 TB/s. CUDA reports about 1 to 2% less memory than the nominal GiB (ECC, firmware).
        _assumed("H100", 79.2, 3.35),
        _assumed("A100-80", 79.2, 2.039),
        _assumed("RTX-PRO-4500", 31.4, 0.896),
        _assumed("L40S", 44.5, 0.864),
    )
}


def custom_gpu(
    base: Gpu | None,
    *,
    memory_bytes: int | None = None,
    bandwidth_bytes_s: float | None = None,
    t_fix_s: float | None = None,
    memory_used: bool = True,
) -> Gpu:
    """A GPU of given numbers, called ``custom`` with what it still has of ``base``, and with the sources of both.

    Args:
        base: what is not given is taken from it; None where everything is.
        memory_bytes, bandwidth_bytes_s, t_fix_s: as ``Gpu``.
        memory_used: False where the memory decides nothing, hence is not told.
    """
    numbers = {"memory": memory_bytes, "bandwidth": bandwidth_bytes_s, "t_fix": t_fix_s}
    given = [name for name, value in numbers.items() if value is not None]
    rest = [name for name, value in numbers.items() if value is None and (name != "memory" or memory_used)]
    source = f"{', '.join(given)} given"
    if base is None:
        if len(given) < len(numbers):
            raise LoopKVError("custom GPU", got=source, wanted="memory, bandwidth and t_fix, or a GPU for the rest")
        base = Gpu("custom", 1, 1.0, 0.0, "")
    if rest:
        source += f"; {' and '.join(rest)} of the {base.name}"
        source += f" ({base.source})" if rest != ["memory"] else ""
    return Gpu(
        f"custom ({' and '.join(rest)} of the {base.name})" if rest else "custom",
        base.memory_bytes if memory_bytes is None else memory_bytes,
        base.bandwidth_bytes_s if bandwidth_bytes_s is None else bandwidth_bytes_s,
        base.t_fix_s if t_fix_s is None else t_fix_s,
        source,
    )


_VENDOR = "nvidia-"
NEAR = 0.8
"""How alike (difflib's ratio) a name must be to be suggested: H10 and H100 are, V100 and H100 are not."""


def _key(name: str) -> str:
    return name.strip().lower().replace(" ", "-").replace("_", "-").removeprefix(_VENDOR)


def get_gpu(name: str) -> Gpu:
    """The GPU called ``name``: case does not matter, nor ``NVIDIA`` before it.

    Raises:
        UnsupportedError: not in the table; a name that is nearly the same is suggested.
    """
    by_key = {key.lower(): gpu for key, gpu in GPUS.items()}
    key = _key(name)
    if key in by_key:
        return by_key[key]
    near = [one for one in by_key if one.startswith(f"{key}-")] or difflib.get_close_matches(key, by_key, 1, NEAR)
    own = "or --memory GIB --bandwidth TB/S --t-fix MS"
    raise UnsupportedError(
        "GPU",
        got=repr(name)[:80],
        wanted=f"{', '.join(GPUS)}, {own}" if not near else ", ".join(GPUS),
        hint=f"did you mean {by_key[near[0]].name}? {own}" if near else None,
    )


def datasheet_bandwidth(hardware: str) -> float | None:
    """Datasheet bandwidth (bytes/s) of a GPU as CUDA calls it (``NVIDIA H100 80GB HBM3``); None for any other machine.

    Of several products of one name (H100 SXM and PCIe) it is that of the table: the fastest.
    """
    words = _key(hardware).split("-")
    for gpu in GPUS.values():
        named = gpu.name.lower().split("-")
        named = named[:1] if gpu.name == "A100-80" else named  # CUDA: A100-SXM4-80GB
        if words[: len(named)] == named:
            return gpu.datasheet_bytes_s
    return None
