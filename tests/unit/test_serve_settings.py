"""Serving without vLLM: settings, the command line, counters between processes."""

import importlib.util
import json
import subprocess
import sys

import pytest

from loopkv import reference
from loopkv.artifacts import Fingerprint
from loopkv.errors import LoopKVError, PlanFormatError, UnsupportedError
from loopkv.models.config import parse_ouro_config
from loopkv.models.ouro import ouro_geometry
from loopkv.planner import named_plan
from loopkv.vllm_plugin.command import MEANINGLESS_OPTIONS, OWN_OPTIONS, serve_command
from loopkv.vllm_plugin.settings import ServeSettings, SettingsError, read_settings

vllm = importlib.util.find_spec("vllm")
needs_vllm = pytest.mark.skipif(vllm is None, reason="vLLM is not installed")


def test_no_settings_mean_no_plan():
    for config in (None, {}, {"other": 1}, "text", ["loopkv"]):
        assert read_settings(config) is None


def test_settings_have_the_documented_defaults():
    settings = read_settings({"loopkv": {"plan": "kivi4"}})
    assert settings == ServeSettings(
        plan="kivi4", prefill="exact", seed_mode="sink", accept_weights=False, prefill_graphs=True
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"plans": "kivi4"}, "did you mean 'plan'?"),
        ({"plan": "x", "seed": "sink"}, "did you mean 'seed_mode'?"),
        ({"plan": ""}, "plan"),
        ({"plan": None}, "plan"),
        ({"plan": "x", "seed_mode": "sinks"}, "'sink', 'timed' or 'none'"),
        ({"plan": "x", "accept_weights": 1}, "accept_weights"),
        ({"plan": "x", "prefill_graph": False}, "did you mean 'prefill_graphs'?"),
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


def test_a_known_name_is_not_shadowed_by_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("kivi4", "kivi4-share3", "uniform:int4", "mine"):
        (tmp_path / name).mkdir()
    assert not any(ServeSettings(plan=name).names_file for name in ("kivi4", "kivi4-share3", "uniform:int4"))
    assert ServeSettings(plan="mine").names_file


@pytest.mark.parametrize("plan", ["x" * 300, "per-loop:" + "int4," * 100, "a\0b"])
def test_what_cannot_be_a_path_is_a_name(plan):
    assert not ServeSettings(plan=plan).names_file


@pytest.mark.parametrize("key", ["Loopkv", "loop_kv", "loop-kv", "LOOPKV", "lookpv", "loopvk", "lopkv", "loopkvs"])
def test_a_misspelt_key_is_not_ignored(key):
    for config in ({key: {"plan": "kivi4"}}, {"loopkv": {"plan": "kivi4"}, key: 1}):
        with pytest.raises(SettingsError) as caught:
            read_settings(config)
        assert str(caught.value).startswith(f"additional_config: unknown key, got {key!r}, wanted 'loopkv'")


@pytest.mark.parametrize("key", ["loopkv_served", "loop", "kv", "lookup", "kv_loop", "loops", 7, "x" * 10_000])
def test_other_keys_of_an_additional_config_are_none_of_ours(key):
    assert read_settings({key: {"plan": "kivi4"}}) is None


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
        ["--additional-config", '{"a": 1}', "--additional-config", '{"b": 2}'],
        ["--additional-config.b", "2"],
        ["--additional_config.b=2"],
        ["--additional-conf", '{"b": 2}'],
        ["--additional", '{"b": 2}'],
    ],
)
def test_an_additional_config_that_cannot_be_merged_is_refused(monkeypatch, given):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    with pytest.raises(SettingsError):
        serve_command("M", ServeSettings(plan="kivi4"), given)


@needs_vllm
@pytest.mark.parametrize("form", [["--config", "{}"], ["--config={}"]])
def test_an_additional_config_in_a_file_would_lose_the_plan(monkeypatch, tmp_path, form):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    file = tmp_path / "server.yaml"
    arguments = [part.format(file) for part in form]
    file.write_text("port: 8001\n")
    serve_command("M", ServeSettings(plan="kivi4"), arguments)
    file.write_text("port: 8001\nadditional_config: {}\n")
    with pytest.raises(SettingsError, match="additional-config in it"):
        serve_command("M", ServeSettings(plan="kivi4"), arguments)


@needs_vllm
def test_the_model_comes_before_options_of_vllm(monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    with pytest.raises(SettingsError, match="before any option"):
        serve_command("--port", ServeSettings(plan="kivi4"), ["8000", "M"])


@needs_vllm
def test_a_plugin_that_vllm_would_not_load_is_noticed(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(UnsupportedError, match="VLLM_PLUGINS=other,loopkv"):
        serve_command("M", ServeSettings(plan="kivi4"))
    monkeypatch.setenv("VLLM_PLUGINS", "other, loopkv")
    with pytest.raises(UnsupportedError, match=r"a space .*export VLLM_PLUGINS=other,loopkv$"):
        serve_command("M", ServeSettings(plan="kivi4"))
    monkeypatch.setenv("VLLM_PLUGINS", "my plugin")
    with pytest.raises(UnsupportedError, match="export VLLM_PLUGINS='my plugin,loopkv'"):
        serve_command("M", ServeSettings(plan="kivi4"))
    monkeypatch.setenv("VLLM_PLUGINS", "other,loopkv")
    serve_command("M", ServeSettings(plan="kivi4"))


@needs_vllm
def test_a_missing_plan_file_is_noticed_before_vllm_starts(monkeypatch, tmp_path):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    with pytest.raises(PlanFormatError, match="No such file"):
        serve_command("M", ServeSettings(plan=str(tmp_path / "plan.json")))


@needs_vllm
@pytest.mark.parametrize(
    ("model", "plan", "arguments", "said"),
    [
        ("M", "kivi5", (), "did you mean 'kivi"),
        ("M", "absent.json", (), "No such file"),
        ("M", "kivi4", ("--prefil", "fast"), "did you mean --prefill?"),
        ("M", "kivi4", ("--accept_weights",), "did you mean --accept-weights?"),
        ("M", "kivi4", ("--prefill-graph",), "did you mean --prefill-graphs?"),
        ("M", "kivi4", ("--no_prefill_graphs",), "did you mean --no-prefill-graphs?"),
        ("M", "kivi4", ("--config", "absent.yaml"), "--config absent.yaml, got No such file or directory"),
        ("./absent", "kivi4", (), "no such folder"),
        ("TMP", "kivi4", (), "config.json"),
        ("TINY", "kivi4-share7", (), "shared loop, got 7"),
        ("TINY", "layer-only", (), "no profile"),
        ("TINY", "PLAN", (), "another geometry: loops, got 2"),
        ("TINY", "WEIGHTS", (), "other weights"),
    ],
)
def test_what_vllm_would_refuse_late_is_refused_at_once(monkeypatch, tmp_path, model, plan, arguments, said):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.chdir(tmp_path)
    tiny = reference.model_folder()
    data = json.loads((tiny / "config.json").read_text())
    shape = ouro_geometry(parse_ouro_config(data, "config.json"))
    named_plan("kivi4", Fingerprint(name="a", geometry=shape.model_copy(update={"loops": 2}))).save("PLAN.json")
    named_plan("kivi4", Fingerprint(name="a", geometry=shape, weights_sha256="0" * 64)).save("WEIGHTS.json")
    plan = f"{plan}.json" if plan.isupper() else plan
    with pytest.raises(LoopKVError) as caught:
        serve_command({"TMP": str(tmp_path), "TINY": str(tiny)}.get(model, model), ServeSettings(plan=plan), arguments)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@needs_vllm
@pytest.mark.parametrize(
    "given",
    [
        ["--attention-backend", "FLASHINFER"],
        ["--attention-backend=FLASHINFER"],
        ["--attention_backend", "FLASHINFER"],
        ["--attention-config.backend", "FLASHINFER"],
        ["--attention-config", '{"flash_attn_version": 2}'],
        ["--block-size", "16"],
        ["--block-size=32"],
        ["--prefix-match-unit", "16"],
    ],
)
def test_an_option_that_a_coded_cache_would_ignore_is_refused(monkeypatch, given):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    with pytest.raises(UnsupportedError) as caught:
        serve_command("M", ServeSettings(plan="kivi4"), ["--port", "1", *given])
    assert f"got {given[0]}, wanted no such option. hint: drop it" in str(caught.value)


@needs_vllm
def test_a_sibling_checkpoint_and_options_of_vllm_pass(monkeypatch, tmp_path):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    tiny = reference.model_folder()
    path = tmp_path / "plan.json"
    data = json.loads((tiny / "config.json").read_text())
    shape = ouro_geometry(parse_ouro_config(data, "config.json"))
    named_plan("kivi4", Fingerprint(name="a", geometry=shape, weights_sha256="0" * 64)).save(path)
    serve_command(str(tiny), ServeSettings(plan=str(path), accept_weights=True))
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    names = [name for action in parser._actions for name in action.option_strings if name.startswith("--")]
    assert len(names) > 100
    others = [name for name in names if name not in ("--additional-config", *MEANINGLESS_OPTIONS)]
    serve_command(str(tiny), ServeSettings(plan="kivi4"), others)
    assert set(MEANINGLESS_OPTIONS) < set(names)


def test_every_option_of_the_verb_is_known_to_the_check_of_misspelt_ones():
    import typer

    from loopkv.cli.app import app

    verb = typer.main.get_command(app).commands["serve"]
    options = {name for parameter in verb.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert {name for name in options if name.startswith("--")} - {"--help"} == set(OWN_OPTIONS)


@needs_vllm
@pytest.mark.parametrize(
    ("model", "given", "named"),
    [
        ("looped-tiny", [], ["--served-model-name", "looped-tiny"]),
        ("looped-tiny", ["--seed", "1"], ["--served-model-name", "looped-tiny"]),
        ("looped-tiny", ["--served-model-name", "a", "b"], []),
        ("looped-tiny", ["--served_model_name=a"], []),
        ("looped-tiny", ["--served-model-nam", "a"], []),
        ("looped-tiny", ["--config", "named.yaml"], []),
        ("looped-tiny", ["--config=other.yaml"], ["--served-model-name", "looped-tiny"]),
        ("M", [], []),
    ],
)
def test_clients_call_the_embedded_model_by_its_name(monkeypatch, tmp_path, model, given, named):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "named.yaml").write_text("served-model-name: a\n")
    (tmp_path / "other.yaml").write_text("port: 8001\n")
    command = serve_command(model, ServeSettings(plan="kivi4"), given)
    first = command.index("serve") + 2
    config = ["--additional-config", '{"loopkv": {"plan": "kivi4"}}']
    assert command[first:] == [*named, *config, *given]


def test_the_serving_command_imports_no_torch_and_no_vllm():
    code = "import sys, loopkv.cli.app, loopkv.vllm_plugin.command, loopkv.vllm_plugin.metrics\n"
    code += "assert not {'torch', 'vllm'} & set(sys.modules), sorted({'torch', 'vllm'} & set(sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
