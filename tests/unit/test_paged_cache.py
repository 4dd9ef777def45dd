"""The paged cache: bytes equal the byte model, pages decode to the codec's values, faults of shipped systems."""

import pytest
import torch
from support.plans import make_plan

from loopkv.codec import decode_keys, decode_values, encode_keys, encode_values
from loopkv.engine.paged_cache import BlockPool, CachedRequest, PagedCache, peak_blocks
from loopkv.errors import LoopKVError, PlanMismatchError, UnsupportedError
from loopkv.geometry import Geometry
from loopkv.layout import lay_out
from loopkv.policy import DEFAULT_POLICY, Policy

CPU = torch.device("cpu")
PAGE = DEFAULT_POLICY.page_tokens
MIXED = ("bf16", "int2", "share", "int4", "int4", "int2")


def geometry(loops=3, layers=2, kv_heads=2, head_dim=32, group=1):
    return Geometry(
        architecture="test",
        loops=loops,
        layers=layers,
        query_heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )


def make_cache(options=MIXED, dtype=torch.float32, blocks=2000, fill_byte=0xFF, shape=None, **sizes):
    plan = make_plan(shape or geometry(), options)
    return PagedCache(lay_out(plan, exact_itemsize=dtype.itemsize, **sizes), dtype, blocks, CPU, fill_byte)


def random_kv(cache, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (tokens, cache.layout.geometry.kv_heads, cache.layout.geometry.head_dim)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(cache.dtype) for _ in "kv")


def grow(cache, request, new_tokens, kv=None):
    """What a step does to the cache: reserve, code the leaving pages, store all cells, settle."""
    cache.reserve(request, new_tokens)
    before, after = (cache.policy.history_end(request.tokens + n) for n in (0, new_tokens))
    cache.code_leaving(request, before, after)
    span = cache.token_span(request, request.tokens, request.tokens + new_tokens)
    for cell in range(len(cache.layout.cells)):
        cache.write_exact(cell, span, *(kv[cell] if kv else random_kv(cache, new_tokens, cell)))
    cache.settle(request, new_tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("options", ["bf16", "int4", "int2", MIXED, ("share",) * 4 + ("int4", "int2")])
def test_stored_bytes_equal_the_byte_model_for_every_length_to_700(options, dtype):
    cache = make_cache(options, dtype)
    plan, layout, request = make_plan(geometry(), options), cache.layout, CachedRequest()
    footprint = plan.footprint_at(dtype.itemsize)
    for tokens in range(1, 701):
        grow(cache, request, 1)
        history = max(0, 32 * ((tokens - 256) // 32) - 32)
        assert request.tokens == tokens
        assert cache.stored_bytes(request) == (
            history * footprint.stored_bytes + (tokens - history) * 6 * 2 * 2 * 32 * dtype.itemsize
        )
        blocks = layout.history_blocks(tokens) + layout.residency.window_blocks(tokens, unprocessed=0)
        assert cache.held_bytes(request) == layout.block_bytes * blocks
        assert cache.pool.free_blocks == 1999 - blocks
    cache.release(request)
    assert cache.pool.free_blocks == 1999


@pytest.mark.parametrize("tokens", [1, 31, 256, 319, 320, 352, 699])
@pytest.mark.parametrize("options", ["bf16", "int4", "int2", MIXED])
def test_the_bytes_written_are_exactly_the_stored_bytes(options, tokens):
    """Two pools with different fill: bytes equal in both were written; live ones are counted, dead ones are known."""
    pools = []
    for fill in (0x00, 0xFF):
        cache, request = make_cache(options, torch.bfloat16, fill_byte=fill), CachedRequest()
        for start in range(0, tokens, 100):
            grow(cache, request, min(100, tokens - start))
        pools.append((cache, request))
    (cache, request), (other, mirror) = pools
    assert request.blocks == mirror.blocks
    written = int((cache.pool.data[request.blocks] == other.pool.data[mirror.blocks]).sum())
    end, bw = cache.policy.history_end(tokens), cache.layout.window_block_tokens
    dead_tokens = sum(request.window[token // bw] > 0 for token in range(32, min(end, tokens)))
    assert written == cache.stored_bytes(request) + dead_tokens * cache.layout.window_token_bytes
    assert dead_tokens < 2 * bw  # beside the sink and beside the window


def test_exact_tokens_never_outgrow_window_and_page():
    """Decode tokens must leave the full-precision window (VeloxQuant-MLX#86): W + P - 1 at most, at any time."""
    cache, request = make_cache("int4", torch.bfloat16), CachedRequest()
    for _ in range(5):
        grow(cache, request, 200)
    per_page = cache.layout.window_token_bytes * PAGE
    for tokens in range(1001, 1101):
        grow(cache, request, 1)
        exact = tokens - cache.policy.history_end(tokens)
        assert 256 <= exact <= 287
        live = [i for i, block in enumerate(request.window) if block]
        bw = cache.layout.window_block_tokens
        assert len(live) * bw <= 32 + 287 + 3 * bw
    before = cache.stored_bytes(request)
    for _ in range(PAGE * 4):
        grow(cache, request, 1)
    coded = make_plan(geometry(), "int4").footprint_at(2).stored_bytes
    assert cache.stored_bytes(request) - before == 4 * PAGE * coded < 4 * per_page


def test_peak_blocks_suffice_for_any_chunking():
    for options, chunk in (("int4", 1), (MIXED, 64), ("bf16", 256), ("int2", 700)):
        layout = make_cache(options).layout
        blocks = 1 + peak_blocks(layout, 1500, chunk)
        cache, request = PagedCache(layout, torch.float32, blocks, CPU, None), CachedRequest()
        while request.tokens < 1500:
            new = min(chunk, 1500 - request.tokens)
            cache.reserve(request, new)
            cache.settle(request, new)


@pytest.mark.parametrize("shape", [(2, 32), (1, 64), (3, 96), (6, 64), (1, 128), (2, 256), (5, 160)])
def test_pages_read_back_as_the_codec_defines_them(shape):
    """Writer and reader share one page struct (a swizzled scale would be a silent loss): bitwise, every option."""
    heads, dim = shape
    cache, request = make_cache(MIXED, shape=geometry(kv_heads=heads, head_dim=dim)), CachedRequest()
    kv = [random_kv(cache, 450, seed=cell) for cell in range(6)]
    for start in range(0, 450, 150):
        grow(cache, request, 150, [tuple(x[start : start + 150] for x in pair) for pair in kv])
    end = cache.policy.history_end(450)
    span = cache.page_span(request, 32, end)
    assert len(span) == (end - 32) // PAGE == 5
    for cell, option in enumerate(MIXED):
        source = {2: 4}.get(cell, cell)  # loop 2 layer 1 shares with loop 3 layer 1
        keys, values = (x[32:end] for x in kv[source])
        if option == "bf16":
            exact = cache.read_exact_pages(cell, span)
            assert torch.equal(exact.k[0], keys) and torch.equal(exact.v[0], values)
            continue
        bits = cache.struct(cell).bits
        assert bits == {"int2": 2, "int4": 4, "share": 4}[option]
        pages = [x.unflatten(0, (-1, PAGE)) for x in (keys, values)]
        for mine, theirs in zip(
            cache.read_codes(cell, span), (encode_keys(pages[0], bits), encode_values(pages[1], bits)), strict=True
        ):
            assert torch.equal(mine.q, theirs.q)
            assert torch.equal(mine.scale, theirs.scale) and torch.equal(mine.zero, theirs.zero)
        recent = cache.read_exact(cell, cache.token_span(request, end, 450))
        assert torch.equal(recent.k[0], kv[cell][0][end:]) and torch.equal(recent.v[0], kv[cell][1][end:])


def test_a_shared_cell_reads_its_targets_scales_and_zeros():
    """Not scales of its own (vLLM#55559): the shared cell's codes are the target's, byte for byte."""
    cache, request = make_cache(("share",) * 4 + ("int4", "int2")), CachedRequest()
    for _ in range(3):
        grow(cache, request, 150)
    span = cache.page_span(request, 32, cache.policy.history_end(450))
    for cell in range(4):
        target = 4 + cell % 2
        assert cache.layout.cells[cell].holder == target
        for mine, theirs in zip(cache.read_codes(cell, span), cache.read_codes(target, span), strict=True):
            assert mine.bits == theirs.bits
            for name in ("q", "scale", "zero"):
                assert torch.equal(getattr(mine, name), getattr(theirs, name))


def test_views_of_unequal_pages_follow_strides_and_touch_no_neighbour():
    """Strides come from the pool, not from a page's own shape (vLLM#49716): padding and neighbours keep their bytes."""
    cache = make_cache(
        MIXED, torch.bfloat16, blocks=200, fill_byte=0xA5, history_block_tokens=64, window_block_tokens=20
    )
    layout, request = cache.layout, CachedRequest()
    sizes = {cell: cache.struct(cell).nbytes if cache.struct(cell) else 2 * PAGE * 64 * 2 for cell in cache.owners}
    assert (len(set(sizes.values())) == 3 and layout.slack_bytes[0] > 0) or layout.slack_bytes[1] > 0
    for cell, view in enumerate(cache._history):
        owner, itemsize = layout.cells[cell].holder, view.element_size()
        assert view.storage_offset() * itemsize == layout.cells[owner].history_offset
        assert view.stride()[:2] == (layout.block_bytes // itemsize, layout.page_bytes // itemsize)
    for cell, view in enumerate(cache._window):
        assert view.storage_offset() * 2 == layout.cells[cell].window_offset == cell * 2 * 20 * 64 * 2
        assert view.stride() == (layout.block_bytes // 2, 20 * 64, 64, 32, 1)
    cache.reserve(request, 450)
    span = cache.page_span(request, 32, 192)
    assert [int(x) for x in span.places] == [1, 0, 1, 0, 1]  # page 0 of block 0 is the sink's
    for cell in cache.owners:
        before = cache.pool.data.clone()
        keys, values = (x.unflatten(0, (-1, PAGE)) for x in random_kv(cache, 5 * PAGE, seed=cell))
        cache.write_pages(cell, span, keys, values)
        changed = (cache.pool.data != before).nonzero()
        starts = {
            (int(b), int(p) * layout.page_bytes + layout.cells[cell].history_offset)
            for b, p in zip(span.blocks, span.places, strict=True)
        }
        for block, byte in changed.tolist():
            assert any(block == b and s <= byte < s + sizes[cell] for b, s in starts)


def test_values_outside_fp16_are_clamped_and_counted():
    """A V zero point or scale that overflows fp16 (vLLM#53334), NaN and inf: nothing of it reaches the pool."""
    cache, request = make_cache("int4", torch.bfloat16), CachedRequest()
    cache.reserve(request, 450)
    span = cache.page_span(request, 32, 96)
    for bad in (7e4, -7e4, 1e5, -1e30, float("inf"), float("-inf"), float("nan")):
        keys, values = (x.unflatten(0, (-1, PAGE)).clone() for x in random_kv(cache, 2 * PAGE))
        keys[0, 3, 1, 5], values[1, 7, 0, 31] = bad, bad
        before = cache.sanitized_elements
        cache.write_pages(1, span, keys, values)
        assert cache.sanitized_elements - before == 2
        coded_keys, coded_values = cache.read_codes(1, span)
        k, v = decode_keys(coded_keys), decode_values(coded_values)
        assert bool(torch.isfinite(k).all()) and bool(torch.isfinite(v).all())
        wanted = 0.0 if bad != bad else max(-65504.0, min(65504.0, bad))
        # at the edge of its group, where codes 0 and 15 lie: exact up to half a code step (0 for a real NaN)
        assert abs(float(k[0, 3, 1, 5]) - wanted) <= max(1.0, 0.501 * float(coded_keys.scale[0, 1, 5]))
        assert abs(float(v[1, 7, 0, 31]) - wanted) <= max(1.0, 0.501 * float(coded_values.scale[1, 7, 0, 0]))
        other = [h for h in range(2) if h != 1]
        assert float((k[0][:, other] - keys[0][:, other].float()).abs().max()) < 1.0  # no other group suffers


@pytest.mark.parametrize("option", ["int4", "int2"])
def test_constant_zero_and_tiny_groups_stay_finite(option):
    """Zero variance (hqq#159), all-zero columns (aiter#4289), scales that underflow fp16 (coremltools#2851)."""
    cache, request = make_cache(option), CachedRequest()
    cache.reserve(request, 450)
    span = cache.page_span(request, 32, 64)
    keys, values = (x.unflatten(0, (-1, PAGE)).clone() for x in random_kv(cache, PAGE))
    keys[0, :, 0, 0], keys[0, :, 0, 1], keys[0, :, 0, 2] = 1.25, 0.0, -3.0
    for channel, magnitude in enumerate((1e-6, 1e-7, 1e-8), start=3):
        keys[0, :, 0, channel] *= magnitude / keys[0, :, 0, channel].abs().max()
    values[0, :, 1] = 0.0
    values[0, 4, 0] = 0.0625
    values[0, 5, 0] *= 1e-8
    cache.write_pages(0, span, keys, values)
    coded_keys, coded_values = cache.read_codes(0, span)
    k, v = decode_keys(coded_keys)[0], decode_values(coded_values)[0]
    assert bool(torch.isfinite(k).all()) and bool(torch.isfinite(v).all())
    assert k[:, 0, :3].unique(dim=0).tolist() == [[1.25, 0.0, -3.0]]
    for channel in (3, 4, 5):  # a scale that underflows loses the range, never more; fp16 steps are 6e-8 down there
        spread = float(keys[0, :, 0, channel].max() - keys[0, :, 0, channel].min())
        assert float((k[:, 0, channel] - keys[0, :, 0, channel]).abs().max()) <= spread + 3.1e-8
    assert not v[:, 1].any() and bool((v[4, 0] == 0.0625).all()) and float(v[5, 0].abs().max()) < 1e-7
    assert cache.sanitized_elements == 0


def test_another_dtype_or_shape_is_refused_not_reinterpreted():
    """fp16 written into a BF16 cache gives fluent nonsense (vLLM#54338); V of another head size, silent loss."""
    for cache_dtype in (torch.bfloat16, torch.float32, torch.float64):
        cache, request = make_cache(dtype=cache_dtype), CachedRequest()
        cache.reserve(request, 4)
        span = cache.token_span(request, 0, 4)
        keys, values = random_kv(cache, 4)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            if dtype != cache_dtype:
                with pytest.raises(UnsupportedError, match=f"keys.*{dtype}.*{cache_dtype}"):
                    cache.write_exact(0, span, keys.to(dtype), values)
                with pytest.raises(UnsupportedError, match=f"values.*{dtype}.*{cache_dtype}"):
                    cache.write_exact(0, span, keys, values.to(dtype))
        with pytest.raises(UnsupportedError, match=r"values.*\[4, 2, 16\].*\[4, 2, 32\]"):
            cache.write_exact(0, span, keys, values[..., :16])
        with pytest.raises(UnsupportedError, match=r"keys.*\[4, 1, 32\]"):
            cache.write_exact(0, span, keys[:, :1], values)
    layout = make_cache().layout
    for dtype in (torch.float16, torch.float8_e4m3fn, torch.int8):
        with pytest.raises(UnsupportedError, match="KV cache dtype"):
            PagedCache(layout, dtype, 10, CPU)
    with pytest.raises(UnsupportedError, match=r"8 bytes.*4 bytes"):
        PagedCache(layout, torch.float64, 10, CPU)


def test_a_head_size_the_groups_do_not_divide_keeps_its_history_exact():
    odd = geometry(kv_heads=8, head_dim=67, group=3)
    with pytest.raises(ValueError, match=r"head size, got 67, wanted a multiple of the value group 32"):
        make_plan(odd, "int4")
    cache, request = make_cache("bf16", torch.bfloat16, shape=odd), CachedRequest()
    kv = [random_kv(cache, 400, seed=cell) for cell in range(6)]
    for start in (0, 200):
        grow(cache, request, 200, [tuple(x[start : start + 200] for x in pair) for pair in kv])
    pages = cache.read_exact_pages(5, cache.page_span(request, 32, 128))
    assert torch.equal(pages.k[0], kv[5][0][32:128]) and torch.equal(pages.v[0], kv[5][1][32:128])


def test_saved_bytes_come_back_and_other_layouts_miss():
    cache = make_cache(MIXED, torch.bfloat16)
    for tokens in (0, 20, 256, 333, 700):
        request = CachedRequest()
        for start in range(0, tokens, 128):
            grow(cache, request, min(128, tokens - start))
        contents = cache.pool.data[request.blocks].clone()
        saved = cache.save(request)
        cache.release(request)
        restored = cache.restore(saved)
        assert restored.tokens == tokens and torch.equal(cache.pool.data[restored.blocks], contents)
        assert cache.stored_bytes(restored) == cache.stored_bytes(request) or tokens
        for other in (
            make_cache("int4", torch.bfloat16),
            make_cache(MIXED, torch.float32),
            make_cache(MIXED, torch.bfloat16, history_block_tokens=64, window_block_tokens=3),
        ):
            with pytest.raises(PlanMismatchError, match="saved request"):
                other.restore(saved)
        cache.release(restored)


def test_the_pool_hands_out_each_block_once_and_never_block_0():
    pool = BlockPool(64, 10, CPU, 0xFF)
    taken = pool.take(9)
    assert sorted(taken) == list(range(1, 10))
    with pytest.raises(LoopKVError, match="0 free blocks"):
        pool.take(1)
    pool.give_back(taken[:3])
    assert sorted(pool.take(3)) == sorted(taken[:3])
    with pytest.raises(KeyError):
        pool.give_back([0])


def test_byte_offsets_pass_two_to_the_31():
    """96 and more cells in one buffer: places are computed in 64 bits (flash-attention#772). Pages lie untouched."""
    policy = Policy()
    shape = geometry(loops=8, layers=12, kv_heads=16, head_dim=128)
    layout = lay_out(make_plan(shape, "int4", policy=policy))
    blocks = (1 << 31) // layout.block_bytes + 200
    cache = PagedCache(layout, torch.bfloat16, blocks, CPU)  # 2 GiB of address space, a few blocks of memory
    cache.pool.take(blocks - 1)
    cache.pool.give_back(range(blocks - 190, blocks))
    request = CachedRequest()
    cache.reserve(request, 352)
    assert min(request.blocks) * layout.block_bytes > 1 << 31
    span = cache.page_span(request, 32, 96)
    assert span.blocks.dtype == torch.int64
    keys, values = (x.unflatten(0, (-1, PAGE)) for x in random_kv(cache, 64))
    cache.write_pages(95, span, keys, values)
    assert torch.equal(cache.read_codes(95, span)[0].q, encode_keys(keys, 4).q)
    tokens = cache.token_span(request, 340, 352)
    cache.write_exact(95, tokens, *random_kv(cache, 12))
    assert torch.equal(cache.read_exact(95, tokens).k[0], random_kv(cache, 12)[0])
