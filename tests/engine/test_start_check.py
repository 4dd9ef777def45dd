"""`loopkv serve --dry-run`: vLLM reads the command, so that what a start would refuse is refused without one."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import harness  # noqa: F401 - sets the environment before vLLM is imported
import pytest

from loopkv.errors import LoopKVError
from loopkv.reference import model_folder
from loopkv.vllm_plugin import start_check
from loopkv.vllm_plugin.start_check import checked_by_vllm

pytestmark = pytest.mark.engine

PLAN = ("--additional-config", json.dumps({"loopkv": {"plan": "kivi4"}}))
NGRAM = json.dumps({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3})


def test_settings_that_a_start_takes() -> None:
    given = ("--served-model-name", "a", "--port", "8123", "--max-model-len", "1024", "--watermark", "0.06")
    assert checked_by_vllm([str(model_folder()), *given, *PLAN]) == start_check.ALL


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--pipeline-parallel-size", "2"), "pipeline parallelism, got 2, wanted 1"),
        (("--speculative-config", NGRAM), "speculative decoding, got ngram"),
        (("--tensor-parallel-size", "4"), "a divisor of the 6 kv heads"),
        (
            ("--max-model-length", "99"),
            "unrecognized arguments: --max-model-length 99. hint: did you mean --max-model-l",
        ),
        (("--max-model-len", "many"), "--max-model-len"),
        (("--max-model-len", "99999999"), "max_model_len"),
        (("--config", "absent.yaml"), "absent.yaml, got No such file or directory"),
        (("--dtype", "float7"), "invalid choice: 'float7'"),
        (("--watermark", "1.0"), "watermark"),
        (("--watermark", "much"), "--watermark: invalid"),
    ],
)
def test_what_a_start_would_refuse(given: tuple[str, ...], said: str) -> None:
    with pytest.raises(LoopKVError) as caught:
        checked_by_vllm([str(model_folder()), *PLAN, *given])
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_options_alone_where_the_model_is_elsewhere() -> None:
    assert checked_by_vllm(["someone/a-model", *PLAN]) == start_check.NO_MODEL
    with pytest.raises(LoopKVError, match="unrecognized arguments"):
        checked_by_vllm(["someone/a-model", *PLAN, "--portt", "1"])


def test_the_command_says_what_was_checked_and_adds_nothing_a_user_could_not_type(
    tmp_path: Path, plan_files: dict[str, str]
) -> None:
    model, plan = shutil.copytree(model_folder(), tmp_path / "model"), plan_files["int4"]
    command = [str(Path(sys.executable).with_name("loopkv")), "serve", str(model), "--plan", plan, "--dry-run"]
    given = ["--port", "81", "--additional-config", '{"other": 1}']
    done = subprocess.run([*command, *given], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("\n") == 1
    assert done.stderr == f"checked by vLLM: {start_check.ALL}\n"
    words = shlex.split(done.stdout)
    assert words[0] == "$" and words[1].endswith("vllm") and words[2:4] == ["serve", str(model)]
    assert words[4:] == ["--additional-config", words[5], "--port", "81"]
    assert json.loads(words[5]) == {"other": 1, "loopkv": {"plan": plan}}


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    shutil.copytree(model_folder(), tmp_path / "model")
    command = [str(Path(sys.executable).with_name("loopkv")), "serve", str(tmp_path / "model"), "--plan", "kivi4"]
    done = subprocess.run(
        [*command, "--dry-run", "--pipeline-parallel-size", "2"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("loopkv: error: a LoopKV plan cannot be served with pipeline parallelism")
