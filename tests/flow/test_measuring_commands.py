"""``loopkv profile``, ``tau``, ``measure`` and ``eval additivity``: options, files, one sentence for bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.random_models import write_random_ouro

from loopkv import reference
from loopkv.artifacts import Plan, Profile
from loopkv.cli import app as cli
from loopkv.records import read_records

HELDOUT = str(Path(reference.__file__).parent / "heldout.jsonl.xz")
MODEL = str(reference.model_folder())
TEXTS = ["--documents", HELDOUT, "--limit", "1", "--max-tokens", "330"]


@pytest.fixture
def loopkv(monkeypatch, capsys):
    """Run the command in this process: (exit code, standard output, standard error)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["loopkv", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
            raise SystemExit(0)
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A profile of the reference model on one document, by the command."""
    output = tmp_path_factory.mktemp("profile") / "p.json"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as caught:
        patch.setattr(sys, "argv", ["loopkv", "profile", MODEL, "-o", str(output), *TEXTS])
        cli.main()
        raise SystemExit(0)
    assert not caught.value.code
    return output


def test_profile_writes_a_file_that_loads(made):
    profile = Profile.load(made)
    assert profile.documents[0].tokens == 330 and profile.documents[0].scored_positions == 11
    assert profile.fingerprint.name == "looped-tiny" and profile.fingerprint.weights_sha256
    assert not list(made.parent.glob("*.journal"))


def test_measure_prints_writes_and_records(loopkv, tmp_path):
    plan = tmp_path / "plan.json"
    code, _, _ = loopkv("plan", "--help")
    assert code == 0
    from loopkv.models import fingerprint_model
    from loopkv.planner import named_plan

    named_plan("kivi2", fingerprint_model(MODEL)).save(plan)
    records = tmp_path / "r.jsonl"
    code, out, err = loopkv("measure", MODEL, str(plan), "kivi4", *TEXTS, "--write", "--records", str(records))
    assert code == 0, err
    assert "kivi2" in out and "kivi4" in out and "1 document" in out
    written = Plan.load(plan)
    assert written.measured is not None and written.measured.kl_nats > 0
    found = list(read_records([records]))
    assert [r.settings["arm"] for r in found] == ["kivi2", "kivi4"]
    assert found[0].value == written.measured.kl_nats


def test_tau_writes_the_plan(loopkv, tmp_path):
    output = tmp_path / "t.json"
    code, out, err = loopkv("tau", MODEL, "kivi4", "-o", str(output), "--candidates", "0,30", *TEXTS)
    assert code == 0, err
    assert Plan.load(output).tau in (0.0, 30.0) and "hot L4" in out


def test_own_documents_are_the_default(loopkv, tmp_path):
    code, _, err = loopkv("measure", MODEL, "kivi4", "--limit", "1", "--max-tokens", "325", "--seed", "3")
    assert code == 0, err
    assert "looped-tiny's own text (seed 3)" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("profile", "nowhere", "-o", "p.json"), "no such folder"),
        (("profile", MODEL, "-o", "p.json", "--documents", "nowhere.jsonl"), "no such file"),
        (("profile", MODEL, "-o", "p.json", "--documents", HELDOUT, "--max-tokens", "100"), "at least 320"),
        (("profile", MODEL, "-o", "p.json", "--documents", HELDOUT, "--prompts", "p.txt"), "--documents too"),
        (("profile", MODEL, "-o", "p.json", "--skip", "3"), "no --documents"),
        (("profile", MODEL, "-o", "p.json", "--device", "toaster"), "device"),
        (("profile", MODEL, "-o", "/proc/p.json", *TEXTS), "cannot write"),
        (("measure", MODEL, "kivi5", *TEXTS), "did you mean 'kivi4'"),
        (("measure", MODEL, "none.json", *TEXTS), "No such file"),
        (("tau", MODEL, "kivi4", *TEXTS), "wanted --output"),
        (("tau", MODEL, "kivi2", "-o", "t.json", *TEXTS), "no cell that reads an int4 history"),
        (("tau", MODEL, "kivi4", "-o", "t.json", "--candidates", "ten", *TEXTS), "--candidates"),
        (("eval", "additivity", MODEL, "none.json", "--documents", HELDOUT), "No such file"),
    ],
)
def test_bad_input_is_one_sentence(loopkv, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, _, err = loopkv(*arguments)
    assert code == 1 and words in err
    assert [line for line in err.splitlines() if "error" in line] == [err.splitlines()[-1]]
    assert "Traceback" not in err and not list(tmp_path.glob("*.json"))


def test_plans_of_another_model_are_refused(loopkv, made, tmp_path):
    other = write_random_ouro(tmp_path / "other", loops=4, layers=4, heads=6, kv_heads=6, head_dim=64, vocab=4096)
    (other / "tokenizer.json").write_bytes((Path(MODEL) / "tokenizer.json").read_bytes())
    from loopkv.models import fingerprint_model
    from loopkv.planner import named_plan

    plan = tmp_path / "plan.json"
    named_plan("kivi4", fingerprint_model(MODEL)).save(plan)
    code, _, err = loopkv("measure", str(other), str(plan), *TEXTS)
    assert code == 1 and "made for other weights" in err
    code, _, err = loopkv("eval", "additivity", str(other), str(made), "--documents", HELDOUT)
    assert code == 1 and "made for other weights" in err


def test_additivity_refuses_a_profile_of_other_documents(loopkv, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = loopkv("eval", "additivity", MODEL, str(made), "--documents", HELDOUT, "--max-tokens", "340")
    assert code == 1 and "profiled documents" in err


def test_additivity_reads_budgets(loopkv, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = loopkv("eval", "additivity", MODEL, str(made), "--documents", HELDOUT, "--budgets", "1/2/3")
    assert code == 1 and "--budgets" in err


def test_a_broken_plan_beside_a_good_one_stops_before_anything_runs(loopkv, tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps({"schema_version": 1, "name": "x"}))
    code, _, err = loopkv("measure", MODEL, "kivi4", str(bad), *TEXTS)
    assert code == 1 and "bad.json" in err and "documents" not in err
