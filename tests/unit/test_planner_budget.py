"""How budgets are written: one strict parser for damages, one for bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopkv.errors import UnsupportedError
from loopkv.planner import parse_bytes, parse_damage
from loopkv.planner.budget import told_limit


@pytest.mark.parametrize(
    ("text", "nats"),
    [
        ("5e-4", 5e-4),
        ("5e-4nats", 5e-4),
        ("5E-4 nats", 5e-4),
        ("0", 0.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("2.0share", 6e-4),
        ("2.0KL_share", 6e-4),
        ("2 KL_share", 6e-4),
        (" 1.19share ", 1.19 * 3e-4),
    ],
)
def test_damage(text: str, nats: float) -> None:
    assert parse_damage(text, 3e-4) == nats


NOT_A_DAMAGE = (
    *(
        "",
        "nats",
        "-1",
        "+1",
        "nan",
        "inf",
        "1e999",
        "1e99999",
        "2.0Share",
        "2.0kl_share",
        "2.0KL",
        "2.0shares",
        "5e-4 nat",
        "1,5",
    ),
    *("0x1p-3", "1_0", "1e", "\u0661", "1" * 400, "2 0share"),
)


@pytest.mark.parametrize("text", NOT_A_DAMAGE)
def test_damage_that_is_none(text: str) -> None:
    with pytest.raises(UnsupportedError, match="damage budget") as caught:
        parse_damage(text, 3e-4)
    assert len(str(caught.value)) < 300


def test_share_needs_kl_share() -> None:
    with pytest.raises(UnsupportedError, match="KL_share is not known"):
        parse_damage("2.0share")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("6912", 6912),
        ("6912B", 6912),
        ("6912 B", 6912),
        ("6.75KiB", 6912),
        ("156KiB", 159744),
        ("1.5 MiB", 1572864),
        ("0", 0),
        ("6.912e3", 6912),
        ("4.8KiB", 4915),  # 4915.2: a part of a byte is dropped
        ("0.3KiB", 307),
        ("1.5", 1),
    ],
)
def test_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "byte budget"),
        ("KiB", "byte budget"),
        ("-5", "byte budget"),
        ("156KB", "did you mean KiB"),
        ("156kib", "did you mean KiB"),
        ("1GiB", "did you mean"),
        ("12parsec", "byte budget"),
        ("1e30", "at most"),
        ("nan", "byte budget"),
        ("1e9999", "at most"),
    ],
)
def test_bytes_that_are_none(text: str, match: str) -> None:
    with pytest.raises(UnsupportedError, match=match) as caught:
        parse_bytes(text)
    assert len(str(caught.value)) < 300


@given(st.text(max_size=80))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for parse in (parse_damage, parse_bytes):
        try:
            assert parse(text) >= 0
        except UnsupportedError as error:
            assert "budget" in str(error)


@given(st.integers(0, 1 << 40))
def test_bytes_round_trip(count: int) -> None:
    assert parse_bytes(str(count)) == parse_bytes(f"{count}B") == count
    assert parse_bytes(f"{count}KiB") == count * 1024


@given(st.floats(0, 1e6))
def test_damage_round_trip(nats: float) -> None:
    assert parse_damage(repr(nats)) == parse_damage(f"{nats!r}nats") == nats


@given(st.floats(1e-12, 1e3), st.floats(1e-9, 1.0))
def test_a_least_damage_can_be_typed_in_either_unit(value: float, kl_share: float) -> None:
    shares, _, nats = told_limit(value, kl_share, least=True).rstrip(")").partition(" (")
    assert parse_damage(nats) == value
    assert value <= parse_damage(shares, kl_share) <= 1.0002 * value  # five digits: at most one in the last place up


@pytest.mark.parametrize(
    ("limit", "kl_share", "said"),
    [
        (4992, 3e-4, "4992B"),
        (6e-4, 3e-4, "2KL_share (0.0006nats)"),
        (6e-4, None, "0.0006nats"),
        (6e-4, 0.0, "0.0006nats"),
        (0.0, 3e-4, "0KL_share (0.0nats)"),
    ],
)
def test_limits_are_told_as_they_are_typed(limit: float, kl_share: float | None, said: str) -> None:
    assert told_limit(limit, kl_share) == said
