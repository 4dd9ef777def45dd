"""Python and C++ agree on what the host tells a kernel: every struct of descriptor.h, field by field."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

import loopkv.kernels
from loopkv.errors import UnsupportedError
from loopkv.kernels import descriptor
from loopkv.kernels.descriptor import CHUNK_TOKENS, MAX_SPLIT_PAGES, STRUCTS, ExactType, SeedMode, check_row
from loopkv.policy import DEFAULT_POLICY, MAX_SPLITS

_CSRC = Path(loopkv.kernels.__file__).parent / "csrc"
_HEADER = (_CSRC / "descriptor.h").read_text()
_SCALARS = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "float": ctypes.c_float}


def _fields(name: str) -> list[tuple[str, str]]:
    body = re.search(rf"struct {name} \{{(.*?)\n\}};", _HEADER, re.S)
    assert body is not None, f"no struct {name} in descriptor.h"
    code = re.sub(r"//[^\n]*", "", body[1])
    declarations = [" ".join(line.split()) for line in code.split(";") if line.strip()]
    return [(line.rsplit(" ", 1)[0], line.rsplit(" ", 1)[1]) for line in declarations]


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda s: s.__name__)
def test_struct_equals_the_header(struct: type[ctypes.Structure]) -> None:
    mirrored = {s.__name__: s for s in STRUCTS}
    offset = 0
    assert [name for _, name in _fields(struct.__name__)] == [field[0] for field in struct._fields_]
    for (declared, name), field in zip(_fields(struct.__name__), struct._fields_, strict=True):
        wanted = ctypes.c_void_p if declared.endswith("*") else _SCALARS.get(declared) or mirrored[declared]
        assert field[1] is wanted, f"{struct.__name__}.{name}: {declared} in C++, {field[1].__name__} in Python"
        alignment = ctypes.alignment(wanted)
        offset = -(-offset // alignment) * alignment  # the rule of both C++ and ctypes
        assert getattr(struct, name).offset == offset
        offset += ctypes.sizeof(wanted)


def test_no_struct_of_the_header_is_missing() -> None:
    assert re.findall(r"^struct (\w+) \{", _HEADER, re.M) == [struct.__name__ for struct in STRUCTS]


@pytest.mark.parametrize(("enum", "prefix"), [(SeedMode, "kSeed"), (ExactType, "k")])
def test_enums_equal_the_header(enum: type[SeedMode] | type[ExactType], prefix: str) -> None:
    body = re.search(rf"enum {enum.__name__} : int32_t \{{(.*?)\}};", _HEADER, re.S)
    assert body is not None
    values = {name.removeprefix(prefix).upper(): int(value) for name, value in re.findall(r"(k\w+) = (\d+)", body[1])}
    assert values == {member.name: int(member) for member in enum}


@pytest.mark.parametrize(
    ("file", "constant", "value"),
    [
        ("row.cuh", "kChunkTokens", CHUNK_TOKENS),
        ("page.cuh", "kPageTokens", 32),
        ("merge.cuh", "32 \\* kMergeRounds", descriptor.MAX_PARTS),
    ],
)
def test_constants_equal_the_sources(file: str, constant: str, value: int) -> None:
    text = (_CSRC / file).read_text()
    if constant.startswith("32"):
        found = re.search(r"constexpr int kMergeRounds = (\d+);", text)
        assert found is not None and 32 * int(found[1]) == value
    else:
        found = re.search(rf"constexpr int {constant} = (\d+);", text)
        assert found is not None and int(found[1]) == value


def test_rows_whose_splits_would_overflow_integer_sums_are_refused() -> None:
    """A token adds at most a digit of a weight (255) times a code in the upper half of a byte (240) to a 32-bit sum."""
    assert 255 * 240 * MAX_SPLIT_PAGES * DEFAULT_POLICY.page_tokens < 2**31
    check_row(MAX_SPLITS * MAX_SPLIT_PAGES, DEFAULT_POLICY)
    with pytest.raises(UnsupportedError, match=r"<= 1048576.*--max-model-len"):
        check_row(MAX_SPLITS * MAX_SPLIT_PAGES + 1, DEFAULT_POLICY)
