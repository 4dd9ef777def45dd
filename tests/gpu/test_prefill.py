"""Prefill through FlashAttention 3: every chunk against the policy in fp32, within twice the error of plain BF16."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from support.mixed_steps import mixed_step, near_queries, new_keys_values
from torch import Tensor

from loopkv.engine.attention import KV, masked_attention, policy_mask
from loopkv.kernels import prefill_plan
from loopkv.kernels.cases import Case, CaseSpec, make_case
from loopkv.kernels.descriptor import cell_descriptors
from loopkv.vllm_plugin.metrics import Counters
from loopkv.vllm_plugin.operators_cuda import CudaStepOperators
from loopkv.vllm_plugin.prefill_cuda import flash_attention
from loopkv.vllm_plugin.step import Step
from loopkv.vllm_plugin.step_parts import view_of

LENGTHS = (1, 31, 32, 33, 255, 256, 257, 287, 288, 289, 319, 320, 321, 352, 700, 2500)


@pytest.fixture(autouse=True)
def _small_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    if flash_attention() is None:
        pytest.skip("no FlashAttention 3 on this device")
    monkeypatch.setattr(prefill_plan, "MIN_NEW_TOKENS", 30)
    monkeypatch.setattr(prefill_plan, "WORTH_OPERATIONS", 0.0)


def _operators(case: Case, max_tokens: int = 8192) -> CudaStepOperators:
    return CudaStepOperators(
        case.layout,
        case.spec.dtype,
        seed="sink",
        max_rows=32,
        max_tokens=max_tokens,
        max_model_tokens=4096,
        device=torch.device("cuda"),
        counters=Counters(),
    )


def _inputs(case: Case, cell: int, counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in one buffer, as a projection leaves them."""
    q, heads = near_queries(case, cell, counts, seed=cell), case.spec.kv_heads
    qkv = torch.cat([q, *new_keys_values(case, cell, counts)], dim=1)
    q, k, v = qkv.split([heads * case.spec.group_queries, heads, heads], dim=1)
    return q, k, v


def _wanted(case: Case, cell: int, row: int, q: Tensor) -> tuple[Tensor, Tensor]:
    """The policy's result in fp32, and PyTorch's attention over the same tokens in BF16."""
    policy, tokens = case.layout.policy, case.spec.tokens[row]
    first = tokens - q.shape[0]
    recent = policy.history_end(first + 1)
    parts = [case.exact_kv(cell, row, range(min(policy.sink_tokens, tokens)))]
    if policy.history_end(tokens) > policy.sink_tokens:
        parts.append(case.history_kv(cell, row))
    parts.append(case.exact_kv(cell, row, range(min(recent, tokens), tokens)))
    keys, values = (torch.cat([part[i].float() for part in parts]) for i in (0, 1))
    mask = policy_mask(policy, first, q.shape[0], q.device)
    result = masked_attention(q.float()[None], KV(keys[None], values[None]), mask)[0]
    group = case.spec.group_queries
    k, v = (x.bfloat16().repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
    plain = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=mask, scale=case.scale)
    return result, plain.transpose(0, 1).float()


def _check(case: Case, counts: list[int], step: Step | None = None, operators: CudaStepOperators | None = None) -> None:
    operators = operators or _operators(case)
    step = step or mixed_step(case, counts)
    operators.code_leaving_pages(step)
    for cell in range(len(case.layout.cells)):
        q, k, v = _inputs(case, cell, counts)
        out = torch.full_like(q, math.nan, memory_format=torch.contiguous_format)
        operators.attend(cell, q, k, v, out, step)
        at = 0
        for row, count in enumerate(counts):
            if count:
                wanted, plain = _wanted(case, cell, row, q[at : at + count])
                got = out[at : at + count].float()
                size = wanted.norm(dim=(1, 2))
                error, usual = ((x - wanted).norm(dim=(1, 2)) / size for x in (got, plain))
                where = (cell, case.spec.tokens[row], count, int(error.argmax()), float(error.max()))
                assert float((got - wanted).norm()) <= 2 * float((plain - wanted).norm()), where
                assert float(error.max()) <= 3 * float(usual.max()), (where, float(usual.max()))  # of single queries
            at += count


SHAPES = [(64, 1), (128, 1), (128, 4), (64, 4), (96, 1), (256, 2)]


@pytest.mark.parametrize("options", [("int4", "int2"), ("bf16", "int4")], ids=",".join)
@pytest.mark.parametrize(("dim", "group"), SHAPES)
def test_whole_prompts_of_every_length(dim: int, group: int, options: tuple[str, ...]) -> None:
    spec = CaseSpec((*LENGTHS, 0), 2, group, dim, options, keep_exact=True, window_block_tokens=10)
    _check(make_case(spec, "cuda"), list(spec.tokens))


@pytest.mark.parametrize("options", [("share", "int4"), ("int2", "bf16")], ids=",".join)
@pytest.mark.parametrize(("dim", "group"), SHAPES)
def test_chunks_beside_decode_rows_and_padding(dim: int, group: int, options: tuple[str, ...]) -> None:
    tokens = (400, 1000, 300, 0, *LENGTHS, 0, 2500, 777)
    counts = [1, 1, 3, 0, *(min(n, size) for n, size in zip(LENGTHS, (256, 64, 100, 255) * 4, strict=True)), 0, 48, 1]
    spec = CaseSpec(tokens, 2, group, dim, options, keep_exact=True, history_block_tokens=64)
    _check(make_case(spec, "cuda"), counts)


@pytest.mark.parametrize("chunk", [49, 64, 256, 300])
def test_chunk_size_changes_nothing_but_rounding(chunk: int) -> None:
    case = make_case(CaseSpec((1000,), 2, 1, 128, ("int4", "int4"), keep_exact=True), "cuda")
    q, k, v = _inputs(case, 0, [600])
    wanted, plain = _wanted(case, 0, 0, q)
    out = torch.full_like(q, math.nan, memory_format=torch.contiguous_format)
    operators, whole = _operators(case), mixed_step(case, [600])
    for begin in range(0, 600, chunk):
        end = min(begin + chunk, 600)
        lens = torch.tensor([400 + end], dtype=torch.int32)
        start = torch.tensor([0, end - begin], dtype=torch.int32)
        step = dataclasses.replace(
            whole,
            seq_lens=lens.cuda(),
            seq_lens_cpu=lens,
            query_start=start.cuda(),
            query_start_cpu=start,
            max_query_tokens=end - begin,
            tokens=end - begin,
        )
        operators.code_leaving_pages(step)
        part = slice(begin, end)
        operators.attend(0, q[part], k[part], v[part], out[part], step)
    assert float((out.float() - wanted).norm()) <= 2 * float((plain - wanted).norm())


def test_tokens_that_leave_inside_their_chunk_have_no_block() -> None:
    case = make_case(CaseSpec((1000,), 2, 1, 128, ("int4", "int2"), keep_exact=True), "cuda")
    step = mixed_step(case, [700])
    size, policy = case.layout.window_block_tokens, case.layout.policy
    table = case.window_table.clone()
    table[0, -(-300 // size) : policy.history_end(1000) // size] = 0
    _check(case, [700], dataclasses.replace(step, window_table=table))


def test_rows_are_divided_where_the_scratch_is_small_and_repeat_exactly() -> None:
    spec = CaseSpec((1800, 1900, 2100, 2500), 2, 1, 128, ("int4", "int4"), keep_exact=True)
    case, counts = make_case(spec, "cuda"), [200, 256, 100, 256]
    operators = _operators(case)
    assert operators.prefill is not None
    operators.prefill.coded_tokens = 4096
    _check(case, counts, operators=operators)
    step = mixed_step(case, counts)
    operators.code_leaving_pages(step)
    q, k, v = _inputs(case, 0, counts)
    first, second = torch.empty_like(q).contiguous(), torch.empty_like(q).contiguous()
    operators.attend(0, q, k, v, first, step)
    operators.attend(0, q, k, v, second, step)
    assert torch.equal(first, second)
    operators.prefill.coded_tokens = 2400  # the longest row takes the other kernel
    _check(case, counts, operators=operators)


@pytest.mark.parametrize("options", [("int4", "int2"), ("bf16", "int4")], ids=",".join)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_pages_of_a_long_chunk_are_coded_to_the_bit(dim: int, options: tuple[str, ...]) -> None:
    """1,500 new tokens after 77: every page that leaves is the reference's, whatever wrote it."""
    case = make_case(CaseSpec((1577,), 3, 1, dim, options, keep_exact=True, history_block_tokens=64), "cuda")
    step, operators = mixed_step(case, [1500]), _operators(case)
    wiped = dataclasses.replace(case, pool=step.pool)
    blocks = case.history_table[0][case.history_table[0] > 0].long()
    wiped.history_view()[blocks] = 255
    operators.code_leaving_pages(step)
    for cell in range(2):
        q, k, v = _inputs(case, cell, [1500])
        operators.attend(cell, q, k, v, torch.empty_like(q).contiguous(), step)
        assert torch.equal(wiped.history_pages(cell, 0), case.history_pages(cell, 0))


@pytest.mark.parametrize(("dim", "group"), [(128, 1), (256, 2)])
def test_a_history_is_expanded_to_the_same_bits_by_either_kernel(dim: int, group: int) -> None:
    """CUDA's and Triton's, all of a group's tasks: coded pages, sink, window and the step's own tokens."""
    options, counts = ("int4", "int2", "bf16", "int4"), [200, 256, 100, 256]
    case = make_case(CaseSpec((1800, 900, 2100, 400), 2, group, dim, options, keep_exact=True), "cuda")
    operators, step = _operators(case), mixed_step(case, counts)
    prefill, view = operators.prefill, view_of(step)
    assert prefill is not None and prefill.expansion is not None and step.seq_lens_cpu is not None
    plan = prefill.plan(step.seq_lens_cpu.numpy(), step.query_start_cpu.numpy())
    assert plan is not None
    scratch = prefill.scratch
    buffers = (scratch.coded_k, scratch.coded_v, scratch.exact_k, scratch.exact_v)
    for index, cell in enumerate(cell_descriptors(case.layout)):
        _, k, v = _inputs(case, index, counts)
        results = []
        for expansion in (prefill.expansion, None):
            for buffer in buffers:
                buffer.fill_(math.nan)
            prefill.expansion, kept = expansion, prefill.expansion
            prefill._expand_tasks(cell, k, v, view, plan.groups[0], plan.groups[0].expand_tasks)
            prefill.expansion = kept
            results.append([buffer.view(torch.int16).clone() for buffer in buffers])
        assert all(torch.equal(ours, other) for ours, other in zip(*results, strict=True)), options[index]
        assert not bool((results[0][0] == results[0][0][-1, 0, 0]).all())  # something was written


def test_a_row_that_is_too_long_for_the_scratch_codes_its_own_pages() -> None:
    case = make_case(CaseSpec((1000, 400), 2, 1, 128, ("int4", "int2"), keep_exact=True), "cuda")
    operators = _operators(case)
    assert operators.prefill is not None
    operators.prefill.coded_tokens = 512
    _check(case, [700, 300], operators=operators)
