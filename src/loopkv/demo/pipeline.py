"""``run_demo``: profile, plan, measure, generate and serve one model, and write the report.

Nothing here is special to the demo's model: each stage is the library function behind the verb of the same name.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopkv import reference
from loopkv.artifacts import Plan, Profile
from loopkv.artifacts.storage import check_replaces
from loopkv.demo.commands import demo_command, profile_command, report_commands
from loopkv.demo.plans import DemoPlans, check_loops, choose_plans
from loopkv.demo.scores import task_scores
from loopkv.demo.serving import CPU_ENGINE_ENVIRONMENT, Answer, serve
from loopkv.demo.stages import Say, Stages
from loopkv.engine.generation import generate
from loopkv.errors import LoopKVError, UnsupportedError
from loopkv.layout import lay_out
from loopkv.models import fingerprint_model, load_model, load_tokenizer
from loopkv.paths import check_output_file, check_output_folder
from loopkv.policy import DEFAULT_POLICY
from loopkv.profiler import load_documents, measure, profile
from loopkv.profiler.journal import belongs_to, count_kept, going_on
from loopkv.profiler.profiling import is_profile_of, profile_key
from loopkv.records import Record, package_versions, read_records
from loopkv.report.demo import (
    DemoReport,
    RequestBytes,
    Sample,
    frontier_points,
    write_demo_report,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from loopkv.artifacts import Fingerprint
    from loopkv.models import LoopedModel
    from loopkv.profiler import Document

SAMPLE_PROMPT_TOKENS = 700
SAMPLE_TOKENS = 96
NEEDLE_TASKS = ("needle_num", "needle_word", "kv_dict", "multiquery")
NEEDLE_TOKENS = 1900
ANSWER_TOKENS = 48
REQUEST_TOKENS = (2048, 8192, 16384)
OUTPUT_FILES = (
    "profile.json",
    "profile.json.journal",
    "loopkv-r.json",
    "loopkv-m.json",
    "serve.log",
    "report.html",
    "summary.json",
)
PLAN_FILES = ("loopkv-r.json", "loopkv-m.json")
SERVING_PACKAGES = ("vllm", "openai")

Progress = Callable[[str], AbstractContextManager[Callable[[float, float, str], None]]]
"""``with progress(title) as report: report(done, total, label)``."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What a demo runs on.

    Args:
        output: folder for the report and everything behind it.
        model: Hugging Face folder of a looped model; the embedded reference model by default.
        documents: file of documents to profile on; the reference model's held-out ones by default.
        limit, max_tokens: how many documents, and tokens of each.
        task_records: Records of ``loopkv eval tasks`` to show, where they belong to this model and these plans.
        serve: end by starting ``vllm serve``.
    """

    output: Path
    model: Path | None = None
    documents: Path | None = None
    limit: int = 8
    max_tokens: int = 1536
    task_records: Path | None = None
    serve: bool = True


@dataclass(frozen=True, slots=True)
class Asked:
    """One question to the server: what it answered, what the exact model answers and what is right."""

    title: str
    wanted: str
    exact: str
    served: Answer
    held_bytes: int
    exact_bytes: int


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What a demo made.

    Args:
        report: everything the page says.
        page: path of ``report.html``.
        asked: questions to the server (none where it was not started).
    """

    report: DemoReport
    page: Path
    asked: tuple[Asked, ...]


def run_demo(settings: DemoSettings, *, say: Say, progress: Progress) -> DemoResult:
    """Run the whole flow.

    Args:
        settings: model, documents and output.
        say: prints a line.
        progress: shows the progress of a long stage.

    Raises:
        LoopKVError: whatever a stage raises, in one sentence.
    """
    output = settings.output
    folder = settings.model or reference.model_folder()
    records = _check_settings(settings)
    stages = Stages(6 if settings.serve else 5, say)
    with stages.stage("profile_s", f"profile {folder.name}: the damage of every cell alone under int4, int2 and share"):
        model, tokenizer, fingerprint = load_model(folder), load_tokenizer(folder), fingerprint_model(folder)
        documents = load_documents(
            settings.documents or reference.heldout_path(),
            tokenizer,
            policy=DEFAULT_POLICY,
            vocab_size=model.vocab_size,
            max_tokens=settings.max_tokens,
            limit=settings.limit,
        ).documents
        made, reused = _profile(model, fingerprint, documents, output / "profile.json", say, progress)
    if reused:  # the figure is what the profile took, not what reading it took
        stages.seconds["profile_s"] = float(made.provenance.get("seconds", stages.seconds["profile_s"]))
    with stages.stage("plan_s", "plan: the exact knapsack, its whole frontier, and hand-made plans beside it"):
        plans = choose_plans(made)
        for plan in (plans.read, plans.memory):
            plan.save(output / f"{plan.name}.json")
    with stages.stage("measure_s", "measure: the fp32 KL of whole plans against the exact model"):
        shown, drawn = _measure(model, fingerprint, plans, documents, progress)
        for plan in shown:
            if plan.name in (plans.read.name, plans.memory.name):
                plan.save(output / f"{plan.name}.json")
    with stages.stage("generate_s", "generate: the same prompts from an exact and from compressed caches"):
        samples = _samples(model, tokenizer, documents[-1], plans)
    asked: tuple[Asked, ...] = ()
    if settings.serve:
        with stages.stage("serve_s", f"serve: vllm serve with {plans.memory.name}, asked through the openai client"):
            asked = _ask(model, tokenizer, folder, output, plans.memory)
            samples += tuple(
                Sample(
                    title=f"Served by vLLM: {item.title}",
                    prompt=f"({item.served.prompt_tokens} tokens of text with the answer hidden in it)",
                    outputs=(("bf16", item.exact), (plans.memory.name, item.served.text.strip())),
                    expected=item.wanted,
                )
                for item in asked
            )
    with stages.stage("report_s", f"report: {output / 'report.html'}"):
        report = DemoReport(
            profile=made,
            plans=shown,
            random_plans=drawn,
            frontier=frontier_points(plans.frontier),
            timings=dict(stages.seconds),
            task_scores=task_scores(records, fingerprint.weights_sha256, {plan.name: plan.sha256 for plan in shown}),
            samples=samples,
            request_bytes=_request_bytes(shown),
            versions=package_versions(),
            budgets=plans.budgets,
            facts=(("Profile", "of an earlier run with the same model and documents"),) if reused else (),
            commands=_commands(settings, folder, shown),
        )
        page = write_demo_report(report, output)
    return DemoResult(report, page, asked)


def _check_settings(settings: DemoSettings) -> list[Record]:
    """Make the output folder and refuse what would stop a later stage; returns the Records of ``task_records``."""
    check_output_folder(settings.output)
    settings.output.mkdir(parents=True, exist_ok=True)
    for name in OUTPUT_FILES:
        check_output_file(settings.output / name)
    check_replaces(settings.output / "profile.json", "profile")
    for name in PLAN_FILES:
        check_replaces(settings.output / name, "plan")
    if settings.serve:
        for package in SERVING_PACKAGES:
            if importlib.util.find_spec(package) is None:
                raise UnsupportedError("demo", got=f"no package {package!r}", wanted="it, to serve", hint="--no-serve")
    return [] if settings.task_records is None else list(read_records([settings.task_records]))


def _profile(
    model: LoopedModel,
    fingerprint: Fingerprint,
    documents: Sequence[Document],
    path: Path,
    say: Say,
    progress: Progress,
) -> tuple[Profile, bool]:
    """The profile, and whether it is a finished one of an earlier run in this folder."""
    journal = path.with_name(path.name + ".journal")
    check_loops(fingerprint)
    if (found := _finished(path)) is not None and is_profile_of(found, fingerprint, documents, DEFAULT_POLICY):
        say(f"      {path} is of this model, these documents and settings: it is used again")
        return found, True
    # A run with other documents may have been interrupted in this folder: the demo does not go on from that.
    key = profile_key(fingerprint, documents, DEFAULT_POLICY)
    restart = not belongs_to(journal, key)
    if kept := count_kept(journal, key):
        say(f"      resuming: {kept:,} measurements found in {journal}")
    with going_on(journal, say), progress("profile") as report:
        made = profile(model, fingerprint, documents, journal=journal, restart=restart, on_progress=report)
    made.save(path)
    journal.unlink(missing_ok=True)
    return made, False


def _finished(path: Path) -> Profile | None:
    """The profile in ``path``; None where there is none, or a broken one, which is replaced."""
    try:
        return Profile.load(path) if path.is_file() else None
    except LoopKVError:
        return None


def _commands(settings: DemoSettings, folder: Path, plans: Sequence[Plan]) -> dict[str, str]:
    """Command lines of this run for the report."""
    path = settings.output / "profile.json"
    documents = settings.documents or reference.heldout_path()
    remake = demo_command(
        settings.output,
        model=settings.model,
        documents=settings.documents,
        limit=settings.limit,
        max_tokens=settings.max_tokens,
        task_records=settings.task_records,
        serve=settings.serve,
    )
    profiling = profile_command(folder, documents, settings.limit, settings.max_tokens, path)
    return report_commands(remake, profiling, path, plans)


def _measure(
    model: LoopedModel, fingerprint: Fingerprint, plans: DemoPlans, documents: Sequence[Document], progress: Progress
) -> tuple[tuple[Plan, ...], tuple[Plan, ...]]:
    """The plans shown and the random ones, each with its measurement."""
    shown = (*plans.hand_made, plans.read, plans.memory)
    with progress("measure") as report:
        results = measure(model, fingerprint, [*shown, *plans.random], documents, on_progress=report)
    measured = [result.plan for result in results]
    return tuple(measured[: len(shown)]), tuple(measured[len(shown) :])


def _samples(
    model: LoopedModel, tokenizer: PreTrainedTokenizerBase, document: Document, plans: DemoPlans
) -> tuple[Sample, ...]:
    prompt = str(tokenizer.decode(list(document.ids[:SAMPLE_PROMPT_TOKENS])))
    arms: list[Plan] = [plans.hand_made[0], plans.read, plans.memory]
    texts = tuple(
        (plan.name, generate(model, tokenizer, [prompt], plan, max_tokens=SAMPLE_TOKENS).completions[0].text)
        for plan in arms
    )
    return (Sample(title="Continue a document", prompt=f"... {prompt[-400:]}", outputs=texts),)


def _ask(
    model: LoopedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, output: Path, plan: Plan
) -> tuple[Asked, ...]:
    from loopkv.vllm_plugin.command import serve_command
    from loopkv.vllm_plugin.settings import ServeSettings

    items = _needles()
    prompts = [str(item["prompt"]) for item in items]
    exact = generate(model, tokenizer, prompts, None, max_tokens=ANSWER_TOKENS, stop=["\n"], batch=len(prompts))
    name = "loopkv-demo"
    plan_path = output / f"{plan.name}.json"
    arguments = ["--served-model-name", name, "--dtype", "bfloat16", "--max-model-len", "4096"]
    arguments += ["--max-num-seqs", "4", "--enforce-eager"]
    command = serve_command(str(folder), ServeSettings(plan=str(plan_path)), arguments)
    with serve(command, name, output / "serve.log", CPU_ENGINE_ENVIRONMENT | _set_variables()) as server:
        served = server.complete(prompts, max_tokens=ANSWER_TOKENS, stop="\n")
    layout = lay_out(plan)
    exact_token = layout.window_token_bytes
    return tuple(
        Asked(
            title=f"{item['task']}, about {item['length']} tokens",
            wanted=item["answer"].strip(),
            exact=reply.text.strip(),
            served=answer,
            held_bytes=layout.request_bytes(tokens := answer.prompt_tokens + answer.completion_tokens),
            exact_bytes=tokens * exact_token,
        )
        for item, reply, answer in zip(items, exact.completions, served, strict=True)
    )


def _needles() -> list[dict[str, Any]]:
    """One long item of each needle task: a fact hidden far from the question."""
    items = reference.task_items()
    found = []
    for task in NEEDLE_TASKS:
        item = next((i for i in items if i["task"] == task and i["length"] == NEEDLE_TOKENS), None)
        if item is None:
            raise LoopKVError("task items", got=f"no {task} of {NEEDLE_TOKENS} tokens", wanted="the embedded items")
        found.append(item)
    return found


def _set_variables() -> dict[str, str]:
    return {name: os.environ[name] for name in CPU_ENGINE_ENVIRONMENT if name in os.environ}


def _request_bytes(plans: Sequence[Plan]) -> tuple[RequestBytes, ...]:
    rows = []
    for plan in plans:
        layout = lay_out(plan)
        rows += [RequestBytes(plan.name, tokens, layout.request_bytes(tokens)) for tokens in REQUEST_TOKENS]
    return tuple(rows)
