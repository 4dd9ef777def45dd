"""The verbs plan, inspect and capacity as a user types them: output, files, exit codes, one sentence per error."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from profiles import geometry, profile, random_damage

from loopkv import reference
from loopkv.artifacts import Fingerprint, Measured, Plan
from loopkv.cli import app as app_module
from loopkv.errors import UnsupportedError
from loopkv.geometry import Geometry
from loopkv.planner import named_plan

OURO = geometry(4, 24, query_heads=16, kv_heads=16, head_dim=128)


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def flat(self) -> str:
        """Output with line breaks and runs of blanks as single blanks, so that wrapping does not matter."""
        return re.sub(r"\s+", " ", self.out)


class Cli:
    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys, self.monkeypatch = capsys, monkeypatch

    def __call__(self, *arguments: object) -> Result:
        self.monkeypatch.setattr(sys, "argv", ["loopkv", *map(str, arguments)])
        self.monkeypatch.setenv("COLUMNS", "80")
        self.capsys.readouterr()
        code: object = 0
        try:
            app_module.main()
        except SystemExit as stop:
            code = stop.code
        captured = self.capsys.readouterr()
        return Result(int(code or 0), captured.out, captured.err)

    def fails(self, *arguments: object) -> str:
        """The one sentence on stderr of a command that must fail and print nothing else."""
        result = self(*arguments)
        assert result.code == 1, result.out
        assert result.out == ""
        assert result.err.startswith("loopkv: error: ") and result.err.count("\n") == 1
        return result.err


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    return Cli(capsys, monkeypatch)


def save(folder: Path, shape: Geometry = OURO, documents: int = 2) -> Path:
    path = folder / "profile.json"
    profile(random_damage(1, shape), shape, documents=documents, kl_share=3e-4).save(path)
    return path


# -- plan -----------------------------------------------------------------------------------------------------------


def test_plan_memory(cli: Cli, tmp_path: Path) -> None:
    path, target = save(tmp_path), tmp_path / "plan.json"
    arguments = ("plan", path, "--goal", "memory", "--max-damage", "20share", "--max-stored", "156KiB", "-o", target)
    result = cli(*arguments, "--tau", "14")
    assert result.code == 0 and "warning: --max-damage is 0.006 nats, 20 KL_share" in result.err
    plan = Plan.load(target)
    assert plan.budget is not None and plan.budget.max_damage_nats == 20 * 3e-4
    assert plan.budget.max_stored_bytes == 156 * 1024 and plan.name == "loopkv-m" and plan.tau == 14.0
    assert plan.predicted is not None
    for part in (
        f"{plan.footprint.stored_bytes / 1024:.4g} KiB per history token",
        "of BF16 (768 KiB)",
        f"{plan.predicted.damage_nats:.3e} nats",
        "x 0.73 for plans without shared cells (other plans); the paper's fit",
        "x 0.97 for plans with shared cells (this plan); the paper's fit on Ouro-1.4B",
        "tau 14: reads",
        plan.sha256[:16],
        "written to",
    ):
        assert part in result.flat, part
    assert max(map(len, result.out.splitlines())) <= 80
    letters = {"int4": "4", "int2": "2", "share": "s", "bf16": "B"}
    row = next(line for line in result.out.splitlines() if line.startswith("loop 3"))
    assert row.split()[2:] == [letters[o] for o in plan.options[48:72]]


def test_plan_read_and_damage_and_flags(cli: Cli, tmp_path: Path) -> None:
    path = save(tmp_path, geometry(4, 4))
    target = tmp_path / "plan.json"
    assert cli("plan", path, "--goal", "read", "--max-damage", "5e-3nats", "-o", target, "--name", "mine").code == 0
    assert Plan.load(target).name == "mine"
    assert cli("plan", path, "--goal", "damage", "--max-stored", 4992, "--max-read", "6912B", "-o", target).code == 0
    shared = Plan.load(target)
    assert shared.footprint.stored_bytes <= 4992 and shared.footprint.read_bytes <= 6912 and shared.shares
    assert cli("plan", path, "--goal", "damage", "--max-stored", 6000, "--no-share", "-o", target).code == 0
    assert not Plan.load(target).shares and set(Plan.load(target).options[12:]) == {"int4"}
    arguments = (
        "plan",
        path,
        "--goal",
        "damage",
        "--max-stored",
        4608,
        "--no-share",
        "--plan-source-cells",
        "-o",
        target,
    )
    assert cli(*arguments).code == 0
    assert set(Plan.load(target).options) == {"int2"}  # 16 x 288 = 4,608 bytes leave no other choice


def test_plan_named(cli: Cli, tmp_path: Path) -> None:
    path, target = save(tmp_path), tmp_path / "plan.json"
    result = cli("plan", path, "--named", "kivi4-share3", "-o", target)
    assert result.code == 0 and "180 KiB per history token" in result.flat
    assert Plan.load(target).predicted is not None
    arguments = ("--named", "layer-only", "--goal", "damage", "--max-stored", "200KiB")
    assert cli("plan", path, *arguments, "-o", target).code == 0
    made = Plan.load(target)
    assert made.options[:24] == made.options[24:48] == made.options[48:72]


def test_plan_named_from_a_checkpoint(cli: Cli, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    result = cli("plan", "--named", "kivi4", "--model", reference.model_folder(), "-o", target)
    assert result.code == 0
    assert "neither predicted nor measured" in result.flat
    assert "7.5 KiB per history token, 31.2% of BF16 (24 KiB)" in result.flat
    plan = Plan.load(target)
    assert plan.fingerprint.name == "looped-tiny" and plan.fingerprint.weights_sha256 is not None


def test_plan_without_output_says_so(cli: Cli, tmp_path: Path) -> None:
    assert "not written (give -o plan.json)" in cli("plan", save(tmp_path), "--named", "kivi4").out


def test_plan_errors_are_one_sentence(cli: Cli, tmp_path: Path) -> None:
    path = save(tmp_path)
    good = ("--goal", "read", "--max-damage", "1.0")
    for arguments, match in (
        ((path,), "neither --goal nor --named"),
        ((path, *good, "--named", "kivi4"), "--goal read and --named kivi4"),
        ((path, "--goal", "reed", "--max-damage", "1"), "did you mean 'read'"),
        ((path, "--goal", "read"), "no max_damage"),
        ((path, "--goal", "memory", "--max-damage", "1"), "add --max-stored 159744B"),  # 156 KiB on Ouro-1.4B
        ((path, "--goal", "read", "--max-damage", "2parsec"), "damage budget"),
        ((path, "--goal", "read", "--max-damage", "-2"), "damage budget"),
        ((path, "--goal", "damage", "--max-stored", "156KB"), "did you mean KiB"),
        ((path, "--goal", "damage", "--max-stored", "1KiB"), "--max-stored >= 61440B"),
        ((path, "--goal", "read", "--max-damage", "1e-9"), "--max-damage >= "),
        ((path, "--named", "kivi5"), "did you mean 'kivi"),
        ((path, "--named", "layer-only"), "no budget"),
        ((path, "--named", "kivi4", "--max-stored", "1KiB"), "a budget without --goal"),
        ((path, "--named", "kivi4", "--no-share"), "--goal alone"),
        ((path, *good, "--plan-source-cells"), "--no-share"),
        ((path, *good, "--tau", "hot"), "--tau"),
        ((path, *good, "--tau", "nan"), "--tau"),
        ((path, *good, "--tau", "-1"), "--tau"),
        ((path, *good, "--name", "x" * 200), "plan name"),
        ((path, *good, "-o", "/proc/no/plan.json"), "cannot write"),
        ((path, *good, "--model", tmp_path), "a profile and --model"),
        (("--named", "kivi4"), "PROFILE or --model FOLDER"),
        (good, "no profile"),
        ((tmp_path / "absent.json", *good), "No such file"),
        ((tmp_path, *good), "a directory"),
        (("--named", "kivi4", "--model", tmp_path), "config.json"),
    ):
        assert match in cli.fails("plan", *arguments), arguments


def test_limits_that_are_hardly_meant_are_said(cli: Cli, tmp_path: Path) -> None:
    path = save(tmp_path, geometry(4, 4))  # KL_share 3e-4 nats; all-BF16 needs 16 x 1,536 = 24,576 bytes
    result = cli("plan", path, "--goal", "memory", "--max-damage", "2.0", "--max-stored", "24KiB")
    assert result.code == 0
    assert "--max-damage is 2 nats, 6.67e+03 KL_share" in result.err and "write 2.0KL_share" in result.err
    assert "--max-stored 24,576 B does not bind: all-BF16 needs 24,576 B" in result.err
    assert "x 0.73" not in result.flat  # fitted on Ouro-1.4B alone
    quiet = cli("plan", path, "--goal", "damage", "--max-stored", 24575, "--max-read", 24575)
    assert quiet.code == 0 and quiet.err == ""


def test_a_profile_is_not_written_over_by_a_plan(cli: Cli, tmp_path: Path) -> None:
    path = save(tmp_path)
    before = path.read_bytes()
    assert "got a profile there" in cli("plan", path, "--named", "kivi4", "-o", path).err
    assert path.read_bytes() == before


def test_one_document_has_no_interval(cli: Cli, tmp_path: Path) -> None:
    path, target = save(tmp_path, geometry(4, 4), documents=1), tmp_path / "plan.json"
    assert "1 of 1536 tokens" in cli("inspect", path).flat
    assert cli("plan", path, "--named", "kivi4", "-o", target).code == 0
    data = {"kl_nats": 4e-4, "top1_agreement": 0.99, "documents_sha256": "0" * 64}
    for interval, said in (((4e-4, 4e-4), "1 document (no interval)"), ((3e-4, 5e-4), "95% CI 3.000e-04 to")):
        Plan.load(target).with_measured(Measured(**data, kl_ci95_nats=interval)).save(target)
        assert said in cli("inspect", target).flat


def test_an_infeasible_budget_leaves_the_old_file(cli: Cli, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    target.write_text("old")
    cli.fails("plan", save(tmp_path), "--goal", "damage", "--max-stored", "1", "-o", target)
    assert target.read_text() == "old"


def test_the_suggested_budget_works(cli: Cli, tmp_path: Path) -> None:
    path = save(tmp_path)
    message = cli.fails("plan", path, "--goal", "memory", "--max-damage", "1e-3", "--max-stored", "100KiB")
    values = dict(re.findall(r"(--max-damage|--max-stored) >= (\S+) ", message))
    nats = re.search(r">= \S+KL_share \((\S+nats)\)", message)
    assert nats and values["--max-damage"].endswith("KL_share") and values["--max-stored"].endswith("B")
    for damage, stored in (
        (values["--max-damage"], "100KiB"),
        (nats[1], "100KiB"),
        ("1e-3", values["--max-stored"]),
    ):
        assert cli("plan", path, "--goal", "memory", "--max-damage", damage, "--max-stored", stored).code == 0


def test_an_infeasible_damage_is_told_in_the_unit_that_was_typed(cli: Cli) -> None:
    profile = Path(__file__).parents[2] / "results/reference/profile.json"
    arguments = ("plan", profile, "--goal", "memory", "--max-stored", "4.875KiB", "--max-damage")
    assert "got --max-damage 2KL_share (0.00047" in cli.fails(*arguments, "2.0KL_share")
    assert "KL_share (0.000478nats), --max-stored 4992B" in cli.fails(*arguments, "4.78e-4nats")


# -- inspect --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        geometry(4, 4),
        OURO,
        geometry(4, 48, query_heads=16, kv_heads=16, head_dim=128),
        geometry(2, 80, query_heads=40, kv_heads=8, head_dim=128),
        geometry(32, 4, prelude_layers=2, coda_layers=2, query_heads=55, kv_heads=55, head_dim=96),
        geometry(4, 20, sliding_looped=(0, 1, 2, 4, 5, 6)),
        geometry(1, 3),
    ],
    ids=["tiny", "24 layers", "48 layers", "80 layers", "huginn", "sliding", "1 loop"],
)
def test_inspect_fits_80_columns(shape: Geometry, cli: Cli, tmp_path: Path) -> None:
    path = save(tmp_path, shape, documents=3)
    result = cli("inspect", path)
    assert result.code == 0 and result.err == ""
    assert max(map(len, result.out.splitlines())) <= 80
    assert "\x1b" not in result.out  # no colour codes into a pipe
    for part in ("3 of 1536 to 1536 tokens", "3.000e-04 nats", "rank the cells with 1.000", "warning: 3 documents"):
        assert part in result.flat
    name = "kivi4-share" if shape.loops > 1 else "kivi4"
    assert cli("plan", path, "--named", name, "-o", tmp_path / "plan.json").code == 0
    result = cli("inspect", tmp_path / "plan.json")
    assert result.code == 0 and max(map(len, result.out.splitlines())) <= 80
    grid = "".join(line[8:] for line in result.out.splitlines() if re.match(r"(loop \d+|prelude|coda) ", line))
    assert len(grid.replace(" ", "").replace(".", "")) == len(shape.cells)
    assert grid.count("s") == (len(shape.loop_cells(0)) if shape.loops > 1 else 0)


def test_inspect_decades(cli: Cli, tmp_path: Path) -> None:
    """A digit is the decade below: 4 stands for 1e-5 to 1e-4."""
    damages = [2.0, 0.5, 0.1, 1e-4, 9.9e-5, 1.1e-5, 1e-10, 9e-11, 0.0]
    shape = geometry(1, len(damages))
    profile(lambda option, cell: damages[cell], shape, options=("int4",), kl_share=None).save(tmp_path / "p.json")
    row = next(line for line in cli("inspect", tmp_path / "p.json").out.splitlines() if line.startswith("loop 1  0"))
    assert row.split()[2:] == ["0", "0", "1", "4", "4", "4", "9", ".", "."]


def test_inspect_small_models_in_numbers(cli: Cli, tmp_path: Path) -> None:
    profile(lambda option, cell: (cell + 1) * 1e-5, geometry(2, 4)).save(tmp_path / "p.json")
    rows = [line.split()[2:] for line in cli("inspect", tmp_path / "p.json").out.splitlines() if line[:5] == "loop "]
    # Two rows of sums, then two of cells for each of int4, int2, share.
    assert rows[2] == ["1.0e-05", "2.0e-05", "3.0e-05", "4.0e-05"]
    assert rows[-1] == [".", ".", ".", "."]


def test_inspect_errors_are_one_sentence(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "other.json").write_text('{"schema_version": 1}')
    assert "broken JSON" in cli.fails("inspect", tmp_path / "text.json")
    assert "a plan (options) or a profile" in cli.fails("inspect", tmp_path / "other.json")
    assert "a directory" in cli.fails("inspect", tmp_path)
    assert "No such file" in cli.fails("inspect", tmp_path / "absent.json")


# -- capacity -------------------------------------------------------------------------------------------------------


def test_capacity_of_a_name(cli: Cli) -> None:
    result = cli("capacity", "--plan", "kivi4-share3", "--geometry", "ouro-1.4b", "--hot-share", 0.2)
    assert result.code == 0 and max(map(len, result.out.splitlines())) <= 80
    for part in (
        "Prediction, not a measurement: H200",
        "BF16 (stock)",
        "KIVI-4 + V",
        "kivi4-share3 + V",
        "fitted to decode steps of stock vLLM 0.26",
    ):
        assert part in result.flat


def test_capacity_of_a_plan_file_finds_the_known_model(cli: Cli, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    cli("plan", save(tmp_path), "--named", "int2-loops", "--tau", "14", "-o", target)
    result = cli("capacity", "--plan", target, "--gpu", "rtx-pro-6000", "--context", "16384")
    assert result.code == 0 and "RTX-PRO-6000, requests of 16384 tokens" in result.flat
    assert "give --hot-share" in result.flat
    tiny = tmp_path / "tiny.json"  # the embedded model's geometry, and one that nobody knows
    cli("plan", "--named", "kivi4", "--model", reference.model_folder(), "-o", tiny)
    assert cli("capacity", "--plan", tiny).code == 0
    named_plan("kivi4", Fingerprint(name="mine", geometry=geometry(3, 5))).save(tiny)
    assert "loopkv capacity, got no model, and a plan of none that is known (mine)" in cli.fails(
        "capacity", "--plan", tiny
    )
    assert "layers, got 24, wanted 48" in cli.fails("capacity", "--plan", target, "--geometry", "ouro-2.6b")
    for missing in ("./absent", "absent.json"):  # what looks like a path is no misspelt name
        said = cli.fails("capacity", "--plan", missing, "--geometry", "ouro-1.4b")
        assert f"plan {Path(missing)}, got No such file or directory" in said
    assert "unknown plan name" in cli.fails("capacity", "--plan", "x" * 300, "--geometry", "ouro-1.4b")


def test_capacity_of_a_checkpoint_and_a_gpu_of_ones_own(cli: Cli) -> None:
    arguments = ("--memory", 2, "--bandwidth", 0.05, "--t-fix", 1)
    result = cli("capacity", "--plan", "kivi4", "--model", reference.model_folder(), *arguments)
    assert result.code == 0
    assert "custom, requests of 8192" in result.flat and "memory, bandwidth, t_fix given" in result.flat
    assert "H200" not in result.flat
    assert "t_fix 0.167 ms (1 ms at 96 cells, this model has 16)" in result.flat


def test_the_verb_that_was_typed_is_named() -> None:
    from loopkv.cli.capacity import _model_size

    with pytest.raises(UnsupportedError, match="loopkv simulate, got no model"):
        _model_size(None, None, None, "loopkv simulate")


def test_capacity_errors_are_one_sentence(cli: Cli, tmp_path: Path) -> None:
    known = ("--plan", "kivi4", "--geometry", "ouro-1.4b")
    for arguments, match in (
        (("--plan", "kivi4"), "no model"),
        ((*known, "--model", tmp_path), "--model and --geometry"),
        (("--plan", "kivi4", "--model", tmp_path), "config.json"),
        (("--plan", "kivi4", "--geometry", "ouro"), "did you mean ouro-"),
        (("--plan", "absent.json", "--geometry", "ouro-1.4b"), "No such file"),
        (("--plan", "kivi5", "--geometry", "ouro-1.4b"), "did you mean 'kivi"),
        (("--plan", tmp_path, "--geometry", "ouro-1.4b"), "a directory"),
        ((*known, "--gpu", "H20"), "did you mean H200"),
        ((*known, "--context", "0"), "context"),
        ((*known, "--context", "999999999999"), "context"),
        ((*known, "--hot-share", "2"), "hot share"),
        ((*known, "--memory", "-1"), "--memory"),
        ((*known, "--memory", "nan"), "--memory"),
        ((*known, "--bandwidth", "0"), "--bandwidth"),
        ((*known, "--t-fix", "-1"), "--t-fix"),
        ((*known, "--utilization", "1.5"), "utilization"),
        ((*known, "--memory", "3"), "weights and activations"),
        ((*known, "--max-requests", "0"), "max requests"),
    ):
        assert match in cli.fails("capacity", *arguments), arguments


# -- help -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["plan", "inspect", "capacity"])
def test_help_has_an_example(verb: str, cli: Cli) -> None:
    result = cli(verb, "--help")
    assert result.code == 0 and f"loopkv {verb} " in result.flat and "Example" in result.flat


# -- names from outside ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["[/b]", "[bold]x", ":smile:", "[red]a[/red]"])
def test_names_are_shown_as_they_are(name: str, cli: Cli, tmp_path: Path) -> None:
    made, plan = save(tmp_path), tmp_path / "plan.json"
    assert name in cli("plan", made, "--goal", "read", "--max-damage", "1", "--name", name, "-o", plan).out
    assert name in cli("inspect", plan).out
    assert name in cli("capacity", "--plan", plan).out


def test_a_name_that_could_not_be_read_back_is_refused(cli: Cli, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    said = cli.fails("plan", save(tmp_path), "--named", "kivi4", "--name", "\udcff", "-o", plan)
    assert "valid Unicode" in said and not plan.exists()


def test_a_prompt_of_broken_bytes_is_one_sentence(cli: Cli) -> None:
    assert "not UTF-8" in cli.fails("generate", reference.model_folder(), "--prompt", "\udcff")
