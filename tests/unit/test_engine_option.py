"""``--engine JSON`` of the commands that start an engine."""

import pytest
from typer.testing import CliRunner

from loopkv.cli.app import app
from loopkv.cli.engine import engine_options
from loopkv.errors import LoopKVError


def test_an_object_is_the_keyword_arguments():
    assert engine_options("{}") == {}
    assert engine_options('{"enforce_eager": true, "kv_cache_memory_bytes": 8}') == {
        "enforce_eager": True,
        "kv_cache_memory_bytes": 8,
    }


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "null", "enforce_eager", "{'a': 1}", "[" * 100_000])
def test_anything_else_is_refused_by_every_command_before_it_starts(text, tmp_path):
    with pytest.raises(LoopKVError, match=r"--engine, got .*wanted a JSON object") as caught:
        engine_options(text)
    assert len(str(caught.value)) < 200
    for command in (
        ["bench", "decode", "--geometry", "tiny", "--arm", "stock", "-o", str(tmp_path / "r.jsonl")],
        ["eval", "served", "looped-tiny", "kivi4"],
    ):
        result = CliRunner().invoke(app, [*command, "--engine", text])
        assert "wanted a JSON object" in str(result.exception)
