"""The prefill kernels compile for every head size that is served, on a machine without a GPU.

The interpreter takes more than the compiler does. The machine code must hold IEEE divisions, no flushing of
subnormals, and 16-byte stores to the scratch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

triton = pytest.importorskip("triton")

ADDRESSES = {"pool": "*u8", "counters": "*i64"} | dict.fromkeys(
    ("coded_lse", "window_lse", "near_lse", "near_o"), "*fp32"
)
INTEGERS = {"tasks", "info", "history_table", "window_table"}
FREE = {"history_stride", "window_stride", "first", "tokens"}
PLACES = {"BLOCK_BYTES": 7_864_320, "PAGE_BYTES": 3_932_160, "PAGES": 2, "WINDOW": 10}


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


def _assembly(kernel: Any, constants: dict[str, int]) -> str:
    """PTX for Hopper, every address and integer a multiple of 16 but those that the kernel excepts."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name in INTEGERS:
            kind = "*i32"
        elif name == "scale" or name.endswith("epsilon"):
            kind = "fp32"
        elif name.endswith(("stride", "offset")) or name in FREE:
            kind = "i32"
        else:
            kind = ADDRESSES.get(name, "*bf16")
        signature[name] = kind
        if name not in FREE and kind != "fp32":
            attributes[(index,)] = [["tt.divisibility", 16]]
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        ASTSource(kernel, signature, values, attributes), target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}
    )
    return str(compiled.asm["ptx"])


@pytest.mark.parametrize(("dim", "bits"), [(64, 4), (96, 4), (96, 2), (128, 4), (128, 2), (128, 16), (256, 4)])
def test_pages_are_coded_by_ieee_arithmetic_and_stored_wide(dim: int, bits: int) -> None:
    from loopkv.kernels.encode import encode_kernel
    from loopkv.kernels.expand import expand_kernel, heads_together

    expand = _assembly(
        expand_kernel, {"BITS": bits, "H": 4, "D": dim, "SINK": 32, **PLACES, "HEADS": heads_together(4)}
    )
    encode = _assembly(encode_kernel, {"BITS": bits, "H": 4, "D": dim, **PLACES})
    for ptx in (expand, encode):
        assert ".ftz" not in ptx
        assert "st.global.v4.b32" in ptx
        assert "st.global.b16" not in ptx or (ptx is encode and bits != 16)  # fp16 scales are single
    assert ("div.rn.f32" in encode) == (bits != 16)
    assert "div.full" not in encode and "div.approx" not in encode


@pytest.mark.parametrize(("dim", "group"), [(64, 16), (96, 1), (128, 1), (256, 4)])
def test_partial_results_are_joined_by_tensor_cores(dim: int, group: int) -> None:
    from loopkv.kernels.join import add_kernel, join_kernel

    for far in (0, 1):
        ptx = _assembly(join_kernel, {"H": 2, "G": group, "D": dim, "WINDOW": 256, "FAR": far})
        assert "mma.sync" in ptx and "st.global.v4.b32" in ptx
    assert "st.global.v4.b32" in _assembly(add_kernel, {"HEADS": 2 * group, "D": dim, "WINDOW": 256})


def test_norms_load_and_store_wide() -> None:
    from loopkv.kernels.norms import sandwich_kernel

    ptx = _assembly(sandwich_kernel, {"E": 2048, "BLOCK": 2048})
    assert "st.global.v4.b32" in ptx and "cvt.rn.bf16" in ptx
