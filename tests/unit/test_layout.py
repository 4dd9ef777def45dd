"""Layout: byte sizes derived by hand for Ouro-1.4B, the choice of block sizes, and laws over random mixed plans."""

import itertools
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loopkv.artifacts import Fingerprint, Plan
from loopkv.codec.pages import CELL_ALIGNMENT_BYTES, page_struct
from loopkv.errors import UnsupportedError
from loopkv.geometry import Geometry
from loopkv.layout import HISTORY_BLOCK_CHOICES, MAX_HIT_GRID_TOKENS, lay_out
from loopkv.policy import Policy

OURO = Geometry(architecture="OuroForCausalLM", loops=4, layers=24, query_heads=16, kv_heads=16, head_dim=128)
KIB = 1024
# Stored per history token: 156 KiB as the paper's memory plan (27 + 24 int4, 19 int2, 26 shared), 215 as its read plan.
MEMORY = ("int4",) * 27 + ("int2",) * 19 + ("share",) * 26 + ("int4",) * 24
READ = ("int2",) * 25 + ("int4",) * 71


def plan_of(options: tuple[str, ...], geometry: Geometry = OURO, policy: Policy | None = None) -> Plan:
    fingerprint = Fingerprint(name="model", geometry=geometry)
    return Plan(name="plan", fingerprint=fingerprint, policy=policy or Policy(), options=options)


@pytest.mark.parametrize(
    # page of all cells = 32 tokens x stored bytes; a window token is 2 x 16 x 128 x 2 B x 96 cells = 768 KiB.
    ("options", "page_kib", "history", "window", "slack_kib"),
    [
        (("int4",) * 96, 32 * 240, 32, 10, (0, 0)),
        (("int2",) * 96, 32 * 144, 32, 6, (0, 0)),
        (("bf16",) * 96, 32 * 768, 32, 32, (0, 0)),
        (MEMORY, 32 * 156, 32, 6, (0, 32 * 156 - 6 * 768)),
        (READ, 32 * 215, 32, 8, (0, 32 * 215 - 8 * 768)),
    ],
)
def test_blocks_of_ouro_plans(
    options: tuple[str, ...], page_kib: int, history: int, window: int, slack_kib: tuple[int, int]
) -> None:
    layout = lay_out(plan_of(options))
    assert layout.page_bytes == page_kib * KIB
    assert layout.window_token_bytes == 768 * KIB
    assert (layout.history_block_tokens, layout.window_block_tokens) == (history, window)
    assert layout.block_bytes == max(page_kib, window * 768) * KIB
    assert layout.slack_bytes == tuple(slack * KIB for slack in slack_kib)


def test_bytes_of_an_8k_request() -> None:
    # By hand in test_residency: 247 history and 34 window blocks of 7.5 MiB.
    assert lay_out(plan_of(("int4",) * 96)).request_bytes(8192) == (247 + 34) * 7680 * KIB
    # Nothing is coded: 20 window blocks for 200 tokens.
    assert lay_out(plan_of(("int4",) * 96)).request_bytes(200) == 20 * 7680 * KIB


def test_block_sizes_are_the_cheapest_on_the_grid() -> None:
    for options in (MEMORY, READ, ("int4",) * 96):
        chosen = lay_out(plan_of(options))
        lengths = range(7940, 8193, 4)

        def mean(history: int, window: int, options: tuple[str, ...] = options, lengths: range = lengths) -> float:
            layout = lay_out(plan_of(options), history_block_tokens=history, window_block_tokens=window)
            return sum(layout.request_bytes(n) for n in lengths) / len(lengths)

        best = mean(chosen.history_block_tokens, chosen.window_block_tokens)
        for history in HISTORY_BLOCK_CHOICES:
            for window in range(1, 65):
                if math.lcm(history, window) <= MAX_HIT_GRID_TOKENS:
                    assert best <= mean(history, window)


def test_a_wider_exact_dtype_makes_wider_window_blocks() -> None:
    layout = lay_out(plan_of(("int4",) * 96), exact_itemsize=4)
    assert layout.window_token_bytes == 1536 * KIB
    assert (layout.history_block_tokens, layout.window_block_tokens) == (32, 5)


def test_fixed_block_sizes() -> None:
    layout = lay_out(plan_of(("int4",) * 96), history_block_tokens=256, window_block_tokens=7)
    assert (layout.history_block_tokens, layout.window_block_tokens) == (256, 7)
    assert layout.pages_per_block == 8
    assert layout.block_bytes == 8 * layout.page_bytes
    assert lay_out(plan_of(("int4",) * 96), history_block_tokens=64).window_block_tokens == 16
    with pytest.raises(UnsupportedError, match="history block, got 48 tokens, wanted a multiple of the page of 32"):
        lay_out(plan_of(("int4",) * 96), history_block_tokens=48)
    with pytest.raises(UnsupportedError, match="window block, got 0 tokens, wanted at least one token"):
        lay_out(plan_of(("int4",) * 96), window_block_tokens=0)
    with pytest.raises(UnsupportedError, match="got history any, window 7 tokens, wanted a least common multiple"):
        lay_out(plan_of(("int4",) * 96), window_block_tokens=7)


@pytest.mark.parametrize("page", [16, 48, 64, 128, 256])
def test_any_page_has_a_block(page: int) -> None:
    layout = lay_out(plan_of(("int4",) * 96, policy=Policy(sink_tokens=0, page_tokens=page)))
    assert layout.history_block_tokens % page == 0
    assert layout.residency.grid_tokens <= max(MAX_HIT_GRID_TOKENS, page)
    assert layout.residency.hits_are_possible


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    page = draw(st.integers(1, 256) | st.sampled_from((8, 16, 32, 64)))
    return Policy(sink_tokens=page * draw(st.integers(0, 4)), window_tokens=draw(st.integers(1, 600)), page_tokens=page)


@settings(max_examples=150, deadline=None)
@given(policies(), st.sampled_from(("bf16", "int4", "int2")), st.sampled_from((2, 4)))
@example(Policy(window_tokens=100, page_tokens=16), "int4", 2)
@example(Policy(window_tokens=288), "int2", 2)
def test_prefix_hits_land_where_the_layout_says_under_any_policy(policy: Policy, option: str, itemsize: int) -> None:
    """The start-up line names ``grid_tokens``: a hit must be possible at every multiple of it, however long."""
    if option != "bf16" and policy.page_tokens % policy.group:
        option = "bf16"  # no code for such a page
    layout = lay_out(plan_of((option,) * 96, policy=policy), exact_itemsize=itemsize)
    rule = layout.residency
    for limit in (policy.first_coded_position + rule.grid_tokens, 4000, 65536):
        assert rule.last_resume_point(limit) == limit // rule.grid_tokens * rule.grid_tokens
    assert rule.grid_tokens <= max(MAX_HIT_GRID_TOKENS, layout.history_block_tokens)


def test_history_blocks_of_a_window_that_no_usual_block_divides() -> None:
    """A window of 100 tokens is 7 pages of 16: blocks of 16 or 112 tokens can start where one ends, 32 cannot."""
    layout = lay_out(plan_of(("int4",) * 96, policy=Policy(window_tokens=100, page_tokens=16, group=16)))
    assert layout.history_block_tokens in (16, 112)
    # 288 tokens are 9 pages of 32.
    assert lay_out(plan_of(("int2",) * 96, policy=Policy(window_tokens=288))).history_block_tokens == 32


@st.composite
def mixed_plans(draw: st.DrawFn) -> Plan:
    loops, layers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    kv_heads = draw(st.sampled_from((1, 2, 3, 8)))
    geometry = Geometry(
        architecture="T",
        loops=loops,
        layers=layers,
        query_heads=kv_heads * 2,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from((32, 64, 96, 128))),
        prelude_layers=draw(st.integers(0, 1)),
        coda_layers=draw(st.integers(0, 1)),
    )
    own = st.sampled_from(("bf16", "int4", "int2"))
    options = tuple(
        draw(own if geometry.source_of(index) is None else own | st.just("share"))
        for index in range(len(geometry.cells))
    )
    return plan_of(options, geometry)


@settings(max_examples=80, deadline=None)
@given(mixed_plans(), st.sampled_from((2, 4)), st.booleans())
def test_cells_lie_apart_inside_their_blocks(plan: Plan, itemsize: int, fixed: bool) -> None:
    sizes = {"history_block_tokens": 64, "window_block_tokens": 5} if fixed else {}
    layout = lay_out(plan, exact_itemsize=itemsize, **sizes)
    geometry, policy = layout.geometry, layout.policy
    exact = geometry.kv_heads * geometry.head_dim * itemsize

    def page_bytes(index: int) -> int:
        option = layout.cells[index].option
        if option.coded:
            return page_struct(option, geometry.kv_heads, geometry.head_dim, policy).nbytes
        return 2 * policy.page_tokens * exact

    spans = []
    for index, place in enumerate(layout.cells):
        if place.option.shares:
            source = geometry.source_of(index)
            assert source is not None
            assert place.holder == source
            assert place.history_offset == layout.cells[source].history_offset
        else:
            assert place.holder == index
            assert place.history_offset % CELL_ALIGNMENT_BYTES == 0
            spans.append((place.history_offset, place.history_offset + page_bytes(index)))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(end <= layout.page_bytes for _, end in spans)
    assert layout.pages_per_block * layout.page_bytes <= layout.block_bytes
    # The window block: cell after cell, keys then values of its tokens.
    step = 2 * layout.window_block_tokens * exact
    assert [place.window_offset for place in layout.cells] == [i * step for i in range(len(layout.cells))]
    assert len(layout.cells) * step <= layout.block_bytes
    assert layout.block_bytes % CELL_ALIGNMENT_BYTES == 0
    # Stored bytes are those of the footprint, but for padding to the alignment.
    padding = layout.page_bytes - policy.page_tokens * plan.footprint_at(itemsize).stored_bytes
    assert 0 <= padding < CELL_ALIGNMENT_BYTES * len(layout.cells)
    assert min(layout.slack_bytes) < CELL_ALIGNMENT_BYTES, "one kind of block fills the byte size"
