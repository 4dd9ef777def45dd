"""``evaluate_served``: the KL of what an engine serves, tokens forced through decode, beside the fp32 reference policy.

The tokens of known documents are forced one by one through decode steps of a real engine, and the logits of every step
are kept. Two divergences from the exact fp32 model are taken over the same positions: that of the served logits, and
that of the reference policy. In float32 their ratio says whether the engine serves the policy that was profiled. In
BF16 rounding alone moves predictions by more than a plan does, so a figure belongs beside that of ``stock``, the same
engine without a plan (semantics, "Comparing").
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loopkv.artifacts import Fingerprint, Plan
from loopkv.artifacts.hashing import handed_on
from loopkv.artifacts.storage import write_atomically
from loopkv.engine.paged_engine import NewTokens, PagedEngine, pool_blocks
from loopkv.engine.whole_sequence import sequence_logits
from loopkv.errors import LoopKVError, UnsupportedError
from loopkv.layout import lay_out
from loopkv.models.base import LoopedModel
from loopkv.options import BF16
from loopkv.policy import DEFAULT_POLICY
from loopkv.profiler.divergence import centred_kl
from loopkv.profiler.documents import Document, documents_sha256
from loopkv.profiler.measuring import bootstrap_interval
from loopkv.profiler.probe import check_precision
from loopkv.records import Record, make_record

STOCK = "stock"
OWN_OPTIONS = ("model", "dtype", "seed", "additional_config", "logits_processors")
"""Options of ``vllm.LLM`` that decide what is measured; each follows from an argument or from the plan."""
DTYPES = ("float32", "bfloat16")
CHECKED_PAGES = 12
WORKER = "loopkv.eval.served_worker"
ENGINE_SECONDS = 600.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ServedJob:
    """What one engine does: force each document's tokens from ``prompt_tokens`` on through decode steps.

    Args:
        model: model folder.
        plan: plan file; None serves vLLM's own cache.
        dtype: of the engine.
        documents: token ids of each document.
        prompt_tokens: tokens given as the prompt; all later ones are decoded.
        pool_bytes: size of the engine's KV pool.
        engine: options of ``vllm.LLM`` on top of the defaults.
        checked_pages: history pages (all cells of each) to re-encode while serving.
        seed: chooses the pages.
        output: folder for what the engine gave.
    """

    model: str
    plan: str | None
    dtype: str
    documents: tuple[tuple[int, ...], ...]
    prompt_tokens: int
    pool_bytes: int
    engine: dict[str, Any]
    checked_pages: int
    seed: int
    output: str

    def save(self, path: Path) -> None:
        """Write the job file."""
        write_atomically(path, json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, path: Path) -> ServedJob:
        """Read a job file that ``save`` wrote."""
        data = json.loads(path.read_text())
        data["documents"] = tuple(tuple(ids) for ids in data["documents"])
        return cls(**data)


@dataclass(frozen=True, slots=True)
class ByteCheck:
    """Pages that were coded while serving, re-encoded at once from the exact tokens in the engine's window blocks.

    Args:
        pages: (document, page) pairs checked, every cell with a history of its own each.
        compared_bytes, differing_bytes: over all of them.
        first_difference: where the first differing byte lies, None where there is none.
    """

    pages: int
    compared_bytes: int
    differing_bytes: int
    first_difference: str | None


@dataclass(frozen=True, slots=True)
class ServedRun:
    """What an engine gave.

    Args:
        folder: holds ``N.npy`` per document, the logits [positions, V] float32 of positions ``prompt_tokens`` on.
        byte_check: None for vLLM's own cache.
        reported_nats: largest difference between the log-probability that the engine reported for a forced token and
            that of the logits kept.
        runner: model runner of the engine.
        hardware: device the engine ran on.
    """

    folder: Path
    byte_check: ByteCheck | None
    reported_nats: float
    runner: str
    hardware: str

    def logits(self, document: int) -> Tensor:
        """Logits [positions, V] of one document."""
        return torch.from_numpy(np.load(self.folder / f"{document}.npy", allow_pickle=False))


@dataclass(frozen=True, slots=True)
class ServedKL:
    """KL of one arm against the exact fp32 model over the decoded positions, mean over documents.

    Args:
        arm: the plan's name, or ``stock``.
        plan: None for stock.
        dtype: of the engine.
        served_nats, policy_nats: per document; the second is that of the fp32 reference policy, empty for stock.
        ci95: interval of the mean of ``served_nats``.
        positions: decoded positions in all.
        worst_nats, worst_document, worst_position: of the served logits.
        top1: share of positions with the exact model's most likely token.
        byte_check: None for stock.
        runner, hardware: of the engine.
        documents_sha256: of the documents as they were cut.
        prompt_tokens: tokens of each document that were prefilled.
        engine: options given to the engine.
        seed: of the interval and the pages checked.
        fingerprint: of the model.
    """

    arm: str
    plan: Plan | None
    dtype: str
    served_nats: tuple[float, ...]
    policy_nats: tuple[float, ...]
    ci95: tuple[float, float]
    positions: int
    worst_nats: float
    worst_document: int
    worst_position: int
    top1: float
    byte_check: ByteCheck | None
    runner: str
    hardware: str
    documents_sha256: str
    prompt_tokens: int
    engine: str
    seed: int
    fingerprint: Fingerprint

    @property
    def served_mean_nats(self) -> float:
        """Mean over documents."""
        return math.fsum(self.served_nats) / len(self.served_nats)

    @property
    def policy_mean_nats(self) -> float | None:
        """The same of the reference policy; None for stock."""
        return math.fsum(self.policy_nats) / len(self.policy_nats) if self.policy_nats else None

    @property
    def ratio(self) -> float | None:
        """Served over policy; None without a policy or where it changes nothing."""
        policy = self.policy_mean_nats
        return self.served_mean_nats / policy if policy else None


def run_in_child(job: ServedJob) -> ServedRun:
    """Run the engine in a process of its own; on CUDA on model runner V1, which takes custom logits processors.

    Raises:
        LoopKVError: the engine failed; its last error line is told.
    """
    folder = Path(job.output)
    job_file, log = folder / "job.json", folder / "engine.log"
    job.save(job_file)
    environment = {**os.environ, **handed_on(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                [sys.executable, "-m", WORKER, str(job_file)],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                timeout=ENGINE_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise LoopKVError("eval served", got=f"an engine that took over {ENGINE_SECONDS:.0f} s") from None
    if done.returncode:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        telling = [line for line in lines if "Error" in line] or lines or ["no output"]
        raise LoopKVError("eval served: the engine failed", got=telling[-1][:400], wanted="logits of every document")
    return read_run(folder)


def read_run(folder: Path) -> ServedRun:
    """What ``served_worker`` wrote into ``folder``."""
    told = json.loads((folder / "run.json").read_text())
    check = told.pop("byte_check")
    return ServedRun(folder=folder, byte_check=None if check is None else ByteCheck(**check), **told)


@torch.inference_mode()
def evaluate_served(
    model: LoopedModel,
    folder: Path,
    fingerprint: Fingerprint,
    arms: Sequence[Plan | None],
    documents: Sequence[Document],
    *,
    prompt_tokens: int,
    dtype: str = "float32",
    engine: Mapping[str, Any] | None = None,
    checked_pages: int = CHECKED_PAGES,
    accept_weights: bool = False,
    seed: int = 0,
    run: Callable[[ServedJob], ServedRun] = run_in_child,
    say: Say = lambda _: None,
    keep: Callable[[ServedKL], None] | None = None,
) -> list[ServedKL]:
    """Serve every document under each arm, tokens forced through decode, and compare with exact model and policy.

    Args:
        model: the checkpoint in fp32: exact model and reference policy.
        folder: of the same checkpoint, for the engine.
        fingerprint: of the checkpoint; plans for another are refused.
        arms: plans; None is vLLM's own cache.
        documents: token ids, each longer than ``prompt_tokens``.
        prompt_tokens: tokens prefilled; positions from there on are scored.
        dtype: of the engine, "float32" or "bfloat16".
        engine: options of ``vllm.LLM`` on top of the defaults.
        checked_pages: history pages per plan whose bytes are checked while serving.
        accept_weights: allow plans of a sibling checkpoint.
        seed: of the bootstrap and of the pages checked.
        run: how an engine is run.
        say: told what goes on.
        keep: given each arm's result as soon as there is one.

    Raises:
        PlanMismatchError: a plan of another model.
        UnsupportedError: a reference in BF16, an unknown dtype, an engine option of ``OWN_OPTIONS``.
        LoopKVError: documents that are too short, or an engine that failed.
    """
    check_precision(model)
    if dtype not in DTYPES:
        raise UnsupportedError("eval served: dtype", got=repr(dtype)[:40], wanted=" or ".join(DTYPES))
    own = sorted(set(OWN_OPTIONS) & set(engine or {}))
    if own:
        raise UnsupportedError(
            f"eval served: engine option {own[0]!r}",
            got=json.dumps((engine or {})[own[0]], default=repr)[:80],
            wanted="other options of vllm.LLM",
            hint="the command sets it itself, or the figure would be of another engine than it says",
        )
    plans = [plan for plan in arms if plan is not None]
    for checked in plans:
        checked.check_serves(fingerprint, accept_weights=accept_weights)
    if len({plan.policy for plan in plans}) > 1:
        raise LoopKVError("plans", got="several sets of constants", wanted="plans of one policy")
    policy = plans[0].policy if plans else DEFAULT_POLICY
    if not arms or not documents or checked_pages < 0:
        raise LoopKVError("eval served", got="no arm, no document or a negative page count", wanted="one or more")
    if prompt_tokens < policy.first_coded_position:
        raise LoopKVError(
            "prompt",
            got=f"{prompt_tokens} tokens",
            wanted=f"at least {policy.first_coded_position}, so that every scored position has a history",
        )
    short = next((d for d in documents if len(d.ids) <= prompt_tokens + 1), None)
    if short is not None:
        raise LoopKVError(
            f"document {short.source}", got=f"{len(short.ids)} tokens", wanted=f"more than {prompt_tokens + 1}"
        )
    ids = [torch.tensor([d.ids], device=model.device) for d in documents]
    as_is = (BF16,) * len(model.geometry.cells)  # this option keeps the model's own dtype
    exact = [sequence_logits(model, x, as_is, policy)[0, prompt_tokens:].cpu() for x in ids]
    say(f"{sum(map(len, exact)):,} decoded positions of {len(documents)} documents, after {prompt_tokens} tokens each")
    results = []
    for plan in arms:
        name = STOCK if plan is None else plan.name
        policy_nats: tuple[float, ...] = ()
        if plan is not None:
            found = [_policy_logits(model, plan, d.ids, prompt_tokens) for d in documents]
            policy_nats = tuple(float(_kl(e, p).mean()) for e, p in zip(exact, found, strict=True))
        with tempfile.TemporaryDirectory(prefix="loopkv-served-") as scratch:
            plan_file = None
            if plan is not None:
                plan_file = str(Path(scratch) / "plan.json")
                plan.model_copy(update={"fingerprint": fingerprint}).save(plan_file)
            job = ServedJob(
                model=str(folder),
                plan=plan_file,
                dtype=dtype,
                documents=tuple(d.ids for d in documents),
                prompt_tokens=prompt_tokens,
                pool_bytes=_pool_bytes(fingerprint, plan, documents, dtype),
                engine=dict(engine or {}),
                checked_pages=checked_pages,
                seed=seed,
                output=scratch,
            )
            served = run(job)
            kl = [_kl(e, served.logits(i)) for i, e in enumerate(exact)]
            right = sum(int((e.argmax(-1) == served.logits(i).argmax(-1)).sum()) for i, e in enumerate(exact))
        worst = max(range(len(kl)), key=lambda i: float(kl[i].max()))
        means = tuple(float(x.mean()) for x in kl)
        positions = sum(map(len, kl))
        result = ServedKL(
            arm=name,
            plan=plan,
            dtype=dtype,
            served_nats=means,
            policy_nats=policy_nats,
            ci95=bootstrap_interval(means, seed),
            positions=positions,
            worst_nats=float(kl[worst].max()),
            worst_document=worst,
            worst_position=prompt_tokens + int(kl[worst].argmax()),
            top1=right / positions,
            byte_check=served.byte_check,
            runner=served.runner,
            hardware=served.hardware,
            documents_sha256=documents_sha256(documents),
            prompt_tokens=prompt_tokens,
            engine=json.dumps(dict(engine or {}), sort_keys=True),
            seed=seed,
            fingerprint=fingerprint,
        )
        say(f"{name}, {dtype}: {result.served_mean_nats:.3e} nats served")
        results.append(result)
        if keep is not None:
            keep(result)
    return results


def _policy_logits(model: LoopedModel, plan: Plan, ids: Sequence[int], prompt_tokens: int) -> Tensor:
    """Logits [positions, V] of the reference policy.

    With tau, what a position reads depends on whether it was decoded. A whole sequence takes every position as a decode
    row, which is the same as long as no prompt token has a history; with a longer prompt the text is decoded token by
    token.
    """
    if plan.tau is None or prompt_tokens <= plan.policy.first_coded_position:
        whole = torch.tensor([list(ids)], device=model.device)
        return sequence_logits(model, whole, plan.cell_options, plan.policy, tau=plan.tau)[0, prompt_tokens:].cpu()
    chunk = plan.policy.max_exact_chunk_tokens
    own = plan.model_copy(update={"fingerprint": Fingerprint(name=model.name, geometry=model.geometry)})
    layout = lay_out(own, exact_itemsize=model.dtype.itemsize)
    engine = PagedEngine(model, own, blocks=pool_blocks(layout, [len(ids)], chunk), layout=layout)
    request = engine.new_request()
    for start in range(0, prompt_tokens, chunk):
        engine.step([NewTokens(request, ids[start : min(start + chunk, prompt_tokens)])])
    return torch.stack([engine.step([NewTokens(request, [token])])[0].cpu() for token in ids[prompt_tokens:]])


def _kl(exact: Tensor, logits: Tensor) -> Tensor:
    """KL(exact || other) of [N, V] logits in nats: [N] fp64."""
    if logits.shape != exact.shape:
        raise LoopKVError("served logits", got=tuple(logits.shape), wanted=tuple(exact.shape))
    return centred_kl(exact, torch.softmax(exact.double(), dim=-1), logits)


def _pool_bytes(fingerprint: Fingerprint, plan: Plan | None, documents: Sequence[Document], dtype: str) -> int:
    """A pool that holds every document at once with room to spare: nothing is preempted."""
    geometry, itemsize = fingerprint.geometry, 4 if dtype == "float32" else 2
    token = len(geometry.cells) * 2 * geometry.kv_heads * geometry.head_dim * itemsize
    if plan is None:
        held = sum(len(d.ids) + 64 for d in documents) * token
    else:
        layout = lay_out(plan, exact_itemsize=itemsize)
        chunk = plan.policy.max_exact_chunk_tokens
        held = sum(layout.request_bytes(len(d.ids)) + 2 * chunk * token for d in documents)
    return held * 5 // 4 + (64 << 20)


def served_records(results: Sequence[ServedKL]) -> list[Record]:
    """``quality.served_kl_nats``, ``quality.policy_kl_nats`` and ``quality.byte_check``; samples are documents."""
    records = []
    for result in results:
        plan = result.plan
        shared: dict[str, Any] = {
            "arm": result.arm,
            "dtype": result.dtype,
            "documents": len(result.served_nats),
            "documents_sha256": result.documents_sha256,
            "prompt_tokens": result.prompt_tokens,
            "positions": result.positions,
            "tau": None if plan is None else plan.tau,
        }
        fields: dict[str, Any] = {
            "plan_sha256": None if plan is None else plan.sha256,
            "model": result.fingerprint.name,
            "weights_sha256": result.fingerprint.weights_sha256,
            "seed": result.seed,
        }
        served = {
            **shared,
            "ci95": list(result.ci95),
            "policy_nats": result.policy_mean_nats,
            "ratio": result.ratio,
            "worst_nats": result.worst_nats,
            "worst_document": result.worst_document,
            "worst_position": result.worst_position,
            "top1": result.top1,
            "runner": result.runner,
            "engine": result.engine,
        }
        records.append(
            make_record(
                "quality.served_kl_nats",
                result.served_mean_nats,
                "nats",
                samples=result.served_nats,
                settings=served,
                **{**fields, "hardware": result.hardware},
            )
        )
        if result.policy_mean_nats is not None:
            records.append(
                make_record(
                    "quality.policy_kl_nats",
                    result.policy_mean_nats,
                    "nats",
                    samples=result.policy_nats,
                    settings=shared,
                    **fields,
                )
            )
        check = result.byte_check
        if check is not None:
            settings = {**shared, "pages": check.pages, "compared_bytes": check.compared_bytes}
            settings["first_difference"] = check.first_difference
            records.append(
                make_record(
                    "quality.byte_check",
                    float(check.differing_bytes),
                    "B",
                    settings=settings,
                    **{**fields, "hardware": result.hardware},
                )
            )
    return records
