"""Serving without vLLM: settings, the command line, counters between processes."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from loopkv.errors import LoopKVError, PlanFormatError, UnsupportedError
from loopkv.vllm_plugin.command import serve_command
from loopkv.vllm_plugin.metrics import COUNTERS, Counters, counters_path, read_counters
from loopkv.vllm_plugin.settings import ServeSettings, SettingsError, read_settings

vllm = importlib.util.find_spec("vllm")
needs_vllm = pytest.mark.skipif(vllm is None, reason="vLLM is not installed")


def test_no_settings_mean_no_plan():
    for config in (None, {}, {"other": 1}, "text", ["loopkv"]):
        assert read_settings(config) is None


def test_settings_have_the_documented_defaults():
    settings = read_settings({"loopkv": {"plan": "kivi4"}})
    assert settings == ServeSettings(plan="kivi4", prefill="exact", seed="sink", accept_weights=False)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"plans": "kivi4"}, "did you mean 'plan'?"),
        ({"plan": ""}, "plan"),
        ({"plan": None}, "plan"),
        ({"plan": "x", "seed": "sinks"}, "'sink', 'timed' or 'none'"),
        ({"plan": "x", "accept_weights": 1}, "accept_weights"),
        ({1: 2}, "unknown setting"),
        (7, "wanted an object"),
    ],
)
def test_settings_that_make_no_sense_say_why(value, said):
    with pytest.raises(SettingsError) as caught:
        read_settings({"loopkv": value})
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("plan", "is_file"), [("kivi4", False), ("per-loop:int4,int2,share", False), ("a.json", True), ("./kivi4", True)]
)
def test_a_plan_is_a_file_or_a_name(plan, is_file):
    assert ServeSettings(plan=plan).names_file is is_file


@needs_vllm
def test_the_command_is_what_a_user_could_type(monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    command = serve_command("M", ServeSettings(plan="kivi4", prefill="fast"), ["--port", "1"])
    assert command[-6:-2] == ["serve", "M", "--additional-config", '{"loopkv": {"plan": "kivi4", "prefill": "fast"}}']
    assert command[-2:] == ["--port", "1"]


@needs_vllm
@pytest.mark.parametrize("given", [["--additional-config", '{"a": 1}'], ['--additional-config={"a": 1}']])
def test_an_additional_config_of_the_users_own_is_kept(monkeypatch, given):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    command = serve_command("M", ServeSettings(plan="kivi4"), ["--port", "1", *given, "--seed", "2"])
    config = json.loads(command[command.index("--additional-config") + 1])
    assert config == {"a": 1, "loopkv": {"plan": "kivi4"}}
    assert command[-4:] == ["--port", "1", "--seed", "2"]


@needs_vllm
@pytest.mark.parametrize(
    "given",
    [
        ["--additional-config"],
        ["--additional-config", "{"],
        ["--additional-config", "[]"],
        ["--additional-config", '{"loopkv": {"plan": "kivi2"}}'],
    ],
)
def test_an_additional_config_that_cannot_be_merged_is_refused(monkeypatch, given):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    with pytest.raises(SettingsError):
        serve_command("M", ServeSettings(plan="kivi4"), given)


@needs_vllm
def test_a_plugin_that_vllm_would_not_load_is_noticed(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(UnsupportedError, match="VLLM_PLUGINS=other,loopkv"):
        serve_command("M", ServeSettings(plan="kivi4"))
    monkeypatch.setenv("VLLM_PLUGINS", "other,loopkv")
    serve_command("M", ServeSettings(plan="kivi4"))


@needs_vllm
def test_a_missing_plan_file_is_noticed_before_vllm_starts(monkeypatch, tmp_path):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    with pytest.raises(PlanFormatError, match="No such file"):
        serve_command("M", ServeSettings(plan=str(tmp_path / "plan.json")))


def test_the_serving_command_imports_no_torch_and_no_vllm():
    code = "import sys, loopkv.cli.app, loopkv.vllm_plugin.command, loopkv.vllm_plugin.metrics\n"
    code += "assert not {'torch', 'vllm'} & set(sys.modules), sorted({'torch', 'vllm'} & set(sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_counters_travel_between_processes(tmp_path):
    path = tmp_path / "w.counters"
    assert read_counters(path) is None
    counters = Counters(path)
    assert read_counters(path) == dict.fromkeys(COUNTERS, 0)
    counters.add("pages_coded", 3)
    counters.add("pages_coded", 4)
    counters.set("history_pages", 2**40)
    assert read_counters(path)["pages_coded"] == 0, "not published yet"
    counters.flush()
    assert read_counters(path) == {**dict.fromkeys(COUNTERS, 0), "pages_coded": 7, "history_pages": 2**40}
    assert path.stat().st_mode & 0o777 == 0o600
    counters.close()
    assert not path.exists() and read_counters(path) is None
    counters.flush()  # after the end: nothing to publish to, nothing breaks


def test_foreign_bytes_are_no_counters(tmp_path):
    path = tmp_path / "x.counters"
    for data in (b"", b"short", b"\0" * (16 + 8 * len(COUNTERS)), os.urandom(16 + 8 * len(COUNTERS) + 1)):
        path.write_bytes(data)
        assert read_counters(path) is None


def test_a_killed_workers_file_goes_with_the_next_worker(tmp_path):
    def name(instance: str):
        return tmp_path / counters_path(instance, 0, 0).name

    code = "import os; from pathlib import Path; from loopkv.vllm_plugin.metrics import Counters; "
    code += f"Counters(Path({str(name('1'))!r})); os._exit(9)"
    subprocess.run([sys.executable, "-c", code], timeout=60)
    assert name("1").exists()
    living = Counters(name("2"))
    assert not name("1").exists() and name("2").exists()
    other = Counters(name("3"))
    assert name("2").exists(), "a living worker's file stays"
    living.close()
    other.close()


def test_a_counter_file_is_never_written_through_a_link(tmp_path):
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "l.counters").symlink_to(tmp_path / "victim")
    with pytest.raises(LoopKVError, match="counter file"):
        Counters(tmp_path / "l.counters")
    assert (tmp_path / "victim").read_text() == "kept"


def test_counters_without_a_file_stay_in_the_process():
    counters = Counters()
    counters.add("clamped_values", 1)
    counters.flush()
    assert counters.values["clamped_values"] == 1
