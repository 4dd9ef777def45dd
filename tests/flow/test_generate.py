"""`generate` and `loopkv generate`: the text of the policy, whatever runs beside a prompt."""

import subprocess
import sys

import pytest
import torch
from support.random_models import write_random_ouro
from typer.testing import CliRunner

from loopkv import reference
from loopkv.artifacts import Fingerprint
from loopkv.cli.app import app
from loopkv.engine.generation import Sampling, generate
from loopkv.engine.whole_sequence import sequence_logits
from loopkv.errors import LoopKVError, PlanMismatchError, UnsupportedError
from loopkv.models import load_model, load_tokenizer
from loopkv.planner.named import named_plan

LONG = "In the beginning God created the heaven and the earth. And the earth was without form, and void. " * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_random_ouro(tmp_path_factory.mktemp("model"), vocab=4096, heads=4, kv_heads=2, max_positions=600)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((reference.model_folder() / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, torch.float64)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def plan_for(model, name, tau=None):
    return named_plan(name, Fingerprint(name=model.name, geometry=model.geometry), tau=tau)


def greedy_by_policy(model, ids, plan, count):
    ids = list(ids)
    for _ in range(count):
        ids.append(int(sequence_logits(model, torch.tensor([ids]), plan.cell_options)[0, -1].argmax()))
    return ids[-count:]


def test_greedy_text_is_the_policys_and_does_not_depend_on_the_batch(model, tokenizer):
    plan = plan_for(model, "kivi2-share")
    prompts = [LONG, "Chapter one", LONG[40:], "a" * 30, LONG[7:900]]
    lengths = [len(tokenizer(prompt).input_ids) for prompt in prompts]
    assert lengths[0] > 330 > 20 > lengths[1]
    expected = [tuple(greedy_by_policy(model, tokenizer(prompt).input_ids, plan, 6)) for prompt in prompts]
    for batch in (1, 2, 5):
        result = generate(model, tokenizer, prompts, plan, max_tokens=6, batch=batch)
        assert [completion.token_ids for completion in result.completions] == expected
        assert [completion.prompt_tokens for completion in result.completions] == lengths
        assert all(completion.text == tokenizer.decode(completion.token_ids) for completion in result.completions)
        assert result.prefill_tokens == sum(lengths) and result.decode_tokens == 5 * 5


def test_statistics_count_the_bytes_of_the_cache(model, tokenizer):
    plan = plan_for(model, "kivi4")
    result = generate(model, tokenizer, [LONG], plan, max_tokens=5)
    (completion,) = result.completions
    cached = completion.prompt_tokens + 4  # the last token is never fed back
    history = plan.policy.history_end(cached) - 32
    assert completion.finish == "length" and completion.cached_tokens == cached
    assert history >= 64
    exact_token = 6 * 2 * 2 * 32 * 8
    assert completion.exact_bytes == cached * exact_token
    assert completion.stored_bytes == history * plan.footprint_at(8).stored_bytes + (cached - history) * exact_token
    assert completion.stored_bytes < completion.held_bytes < completion.exact_bytes
    assert result.hot_share is None and result.tokens_per_s > 0
    (exact,) = generate(model, tokenizer, [LONG], max_tokens=5).completions
    assert exact.stored_bytes == exact.exact_bytes == completion.exact_bytes
    assert 0 < generate(model, tokenizer, [LONG], plan_for(model, "kivi4", 5.0), max_tokens=5).hot_share < 1


def test_sampling_follows_its_seed_and_prompt_only(model, tokenizer):
    plan = plan_for(model, "kivi4")
    prompts = ["Chapter one", LONG, "Chapter one"]
    sampling = Sampling(temperature=1.0, top_p=0.95, seed=7)

    def texts(prompts, batch, seed=7):
        options = Sampling(temperature=1.0, top_p=0.95, seed=seed)
        result = generate(model, tokenizer, prompts, plan, max_tokens=12, sampling=options, batch=batch)
        return [completion.token_ids for completion in result.completions]

    assert sampling == Sampling(1.0, 0.95, 7)
    first = texts(prompts, 3)
    assert first == texts(prompts, 1)
    assert first[0] != first[2]  # prompt i draws with seed + i
    assert texts(prompts[2:], 1, seed=9) == first[2:]
    assert texts(prompts, 3, seed=8) != first


def test_the_next_token_is_drawn_from_the_smallest_set_that_reaches_top_p():
    logits = torch.tensor([0.1, 0.5, 0.3, 0.1]).log()
    generator = torch.Generator().manual_seed(0)

    def share(sampling, count=4000):
        drawn = torch.tensor([sampling.choose(logits, generator) for _ in range(count)])
        return [float((drawn == token).double().mean()) for token in range(4)]

    full = share(Sampling(temperature=1.0))
    assert all(abs(a - b) < 0.04 for a, b in zip(full, (0.1, 0.5, 0.3, 0.1), strict=True))  # 4 sigma: 0.032
    nucleus = share(Sampling(temperature=1.0, top_p=0.6))
    assert nucleus[0] == nucleus[3] == 0 and abs(nucleus[1] - 0.625) < 0.04  # 0.5 / 0.8
    assert share(Sampling(temperature=1.0, top_p=1e-6), 20) == [0, 1, 0, 0]
    cold = share(Sampling(temperature=0.5), 4000)
    assert abs(cold[1] - 0.25 / 0.36) < 0.04
    assert Sampling().choose(logits, generator) == 1
    with pytest.raises(LoopKVError, match="not finite"):
        Sampling().choose(torch.tensor([0.0, float("nan")]), generator)


def test_a_stop_string_or_an_end_token_ends_a_continuation(model, tokenizer):
    told = {}
    whole = generate(model, tokenizer, ["Chapter one"], max_tokens=30).completions[0]
    stop = whole.text[5:8]
    result = generate(
        model,
        tokenizer,
        ["Chapter one", LONG],
        max_tokens=30,
        stop=[stop],
        on_text=lambda index, text: told.setdefault(index, []).append(text),
    )
    first = result.completions[0]
    assert first.finish == "stop" and first.text == whole.text[: whole.text.index(stop)]
    assert ["".join(told.get(index, [])) for index in range(2)] == [c.text for c in result.completions]
    end = whole.token_ids[4]
    model.eos_token_ids, before = (end,), model.eos_token_ids
    try:
        ended = generate(model, tokenizer, ["Chapter one"], max_tokens=30).completions[0]
    finally:
        model.eos_token_ids = before
    assert ended.finish == "end" and ended.token_ids == whole.token_ids[: whole.token_ids.index(end)]


def test_senseless_requests_are_refused_in_one_sentence(model, tokenizer):
    for prompts, options, error, words in (
        ([], {}, LoopKVError, "prompts, got none"),
        (["ok", ""], {}, LoopKVError, "prompt ''.*no tokens"),
        (["a"], {"max_tokens": 600}, UnsupportedError, r"1 tokens and up to 600.*600 positions"),
        (["a"], {"max_tokens": 0}, UnsupportedError, "max_tokens 0"),
        (["a"], {"batch": 0}, UnsupportedError, "batch 0"),
        (["a"], {"stop": [""]}, UnsupportedError, "stop string"),
    ):
        with pytest.raises(error, match=words):
            generate(model, tokenizer, prompts, **options)
    for options in ({"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5}, {"seed": -1}):
        with pytest.raises(UnsupportedError, match=next(iter(options))):
            Sampling(**options)
    with pytest.raises(PlanMismatchError, match="loops, got 4, wanted 3"):
        other = load_model(reference.model_folder())
        generate(model, tokenizer, ["a"], plan_for(other, "kivi4"))


def test_the_command_streams_texts_in_order_and_reports_the_cache(folder, model, tokenizer, tmp_path):
    (tmp_path / "prompt.txt").write_text(LONG)
    arguments = ["generate", str(folder), "--plan", "kivi4", "--max-tokens", "4", "--dtype", "float64"]
    result = CliRunner().invoke(
        app, [*arguments, "--prompt", "Chapter", "--prompt-file", str(tmp_path / "prompt.txt"), "--prompt-file", "-"],
        input="Amen", catch_exceptions=False,
    )  # fmt: skip
    assert result.exit_code == 0
    texts = [
        completion.text
        for completion in generate(
            model, tokenizer, ["Chapter", LONG, "Amen"], plan_for(model, "kivi4"), max_tokens=4
        ).completions
    ]
    assert result.stdout == "".join(f"== prompt {i}\n{text}\n" for i, text in enumerate(texts, 1))
    assert "plan kivi4 keeps" in result.stderr and "tokens/s" in result.stderr
    single = CliRunner().invoke(app, [*arguments, "--prompt", "Chapter"], catch_exceptions=False)
    assert single.stdout == texts[0] + "\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no prompt"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
        (["--prompt-file", "."], "prompt file ."),
        (["--prompt", "a", "--plan", "kivi5"], "did you mean 'kivi4'"),
        (["--prompt", "a", "--plan", "plan.json"], "plan.json"),
        (["--prompt", "a", "--max-tokens", "601"], "600 positions"),
        (["--prompt", "a", "--top-p", "2"], "top_p"),
    ],
)
def test_bad_arguments_are_one_sentence(folder, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["generate", str(folder), *arguments])
    assert isinstance(result.exception, LoopKVError) and words in str(result.exception)


def test_a_prompt_that_is_not_text_ends_the_process_with_one_sentence(folder, tmp_path):
    (tmp_path / "prompt.bin").write_bytes(b"\xff\xfe\x00")
    command = [sys.executable, "-m", "loopkv", "generate", str(folder), "--prompt-file", str(tmp_path / "prompt.bin")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("loopkv: error: prompt file") and done.stderr.count("\n") == 1
