"""``looped-tiny`` means the embedded model in every command that takes a model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from loopkv import reference
from loopkv.artifacts import Plan
from loopkv.cli.app import app
from loopkv.vllm_plugin.command import serve_command
from loopkv.vllm_plugin.settings import ServeSettings


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command by its words; a group has ``commands``."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


TAKING_A_MODEL = {
    name: (command, parameter)
    for name, command in commands(typer.main.get_command(app))
    for parameter in command.params
    if parameter.name == "model"
}


def parsed(name: str, text: str) -> Any:
    """What the command called ``name`` is given for its model when a user types ``text``."""
    command, parameter = TAKING_A_MODEL[name]
    words = [text] if parameter.param_type_name == "argument" else ["--model", text]
    return command.make_context(name, words, resilient_parsing=True).params["model"]


def test_the_commands_that_take_a_model():
    assert set(TAKING_A_MODEL) == {
        "profile",
        "plan",
        "tau",
        "measure",
        "generate",
        "eval tasks",
        "eval served",
        "eval additivity",
        "capacity",
        "serve",
        "bench decode",
        "bench slo",
        "bench workload",
        "simulate",
        "demo",
    }


@pytest.mark.parametrize("name", sorted(set(TAKING_A_MODEL) - {"serve"}))
def test_the_name_is_the_embedded_model_and_a_path_stays_one(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("looped-tiny").mkdir()
    assert parsed(name, "looped-tiny") == reference.model_folder()
    for text in ("./looped-tiny", "Ouro-1.4B", "/a/b", "ByteDance/Ouro-1.4B", "a\0b"):
        assert parsed(name, text) == Path(text)
    parameter = TAKING_A_MODEL[name][1]
    assert "looped-tiny" in (parameter.help or "") + str(parameter.metavar)


def test_serving_by_name(monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    served = [serve_command(name, ServeSettings(plan="kivi4"))[2] for name in ("looped-tiny", "ByteDance/Ouro-1.4B")]
    assert "looped-tiny" in TAKING_A_MODEL["serve"][1].help
    assert served == [str(reference.model_folder()), "ByteDance/Ouro-1.4B"]


def test_commands_run_on_the_embedded_model_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for line in (
        "plan --named kivi4 --model looped-tiny -o plan.json",
        "capacity --plan plan.json --model looped-tiny --context 2048",
        "bench workload --traffic small --requests 30 --model looped-tiny -o work.jsonl",
        "simulate work.jsonl --model looped-tiny --arm stock --arm kivi4 --pool 1 -o simulated.jsonl",
    ):
        done = CliRunner().invoke(app, line.split())
        assert done.exit_code == 0, (line, done.output, done.exception)
    assert Plan.load("plan.json").fingerprint.name == "looped-tiny"
    assert {json.loads(line)["model"] for line in Path("simulated.jsonl").read_text().splitlines()} == {"looped-tiny"}
