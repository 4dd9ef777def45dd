"""Plans and profiles as hostile input: every broken file is one clear sentence, and golden files stay loadable."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopkv.artifacts import Fingerprint, Plan, Profile
from loopkv.artifacts import storage as storage_module
from loopkv.artifacts.storage import write_atomically
from loopkv.errors import LoopKVError, PlanFormatError, PlanMismatchError, PlanVersionError, ProfileFormatError
from loopkv.inspection import inspect_file

GOLDEN = Path(__file__).parent / "golden"
PLAN = json.loads((GOLDEN / "plan-v1.json").read_text())
PROFILE = json.loads((GOLDEN / "profile-v1.json").read_text())
Edit = Callable[[dict[str, Any]], Any]


def write(folder: Path, data: object, name: str = "file.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(data))
    return path


def refuse(load: Callable[[Path], object], path: Path, *errors: type[LoopKVError]) -> str:
    """The message of the refusal: one line, short, naming the file."""
    with pytest.raises(errors or (LoopKVError,)) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700, message
    assert path.name in message
    return message


# -- golden files ---------------------------------------------------------------------------------------------------


def test_golden_plan_stays_loadable() -> None:
    plan = Plan.load(GOLDEN / "plan-v1.json")
    assert plan.options == ("int2", "share", "int2", "int4", "int4")
    assert (plan.footprint.stored_bytes, plan.footprint.read_bytes) == (2 * 288 + 2 * 480, 2 * 288 + 3 * 480)
    assert plan.tau == 14.0 and plan.measured is not None and plan.measured.kl_ci95_nats == (1.5e-3, 2.5e-3)
    # The identity of what is executed must not drift between releases: prefix caches and Records refer to it.
    assert plan.sha256 == "90f5ce1c485f3be857db1d5f16976075e6c23c9453a595fe8c497d5152cb0608"


def test_golden_profile_stays_loadable_and_plans() -> None:
    profile = Profile.load(GOLDEN / "profile-v1.json")
    assert profile.sha256 == "44406f224c526f63033da719fdd689b1f34b27d2e93b2ad3c31853daf59640c4"
    assert profile.damage("int2")[1] == pytest.approx(4e-4, rel=1e-12)
    assert profile.damage("share") == (None, 1.0e-3, 1.5e-3, None, None)
    Plan.load(GOLDEN / "plan-v1.json").predicted_matches(profile.sha256)


@pytest.mark.parametrize(("cls", "name"), [(Plan, "plan-v1.json"), (Profile, "profile-v1.json")])
def test_saving_a_golden_file_gives_the_same_bytes(cls: type[Plan] | type[Profile], name: str, tmp_path: Path) -> None:
    cls.load(GOLDEN / name).save(tmp_path / name)
    assert (tmp_path / name).read_bytes() == (GOLDEN / name).read_bytes()


# -- broken contents ------------------------------------------------------------------------------------------------


def _set(*path: str | int) -> Callable[[object], Edit]:
    def with_value(value: object) -> Edit:
        def edit(data: dict[str, Any]) -> None:
            at: Any = data
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = value

        return edit

    return with_value


def _drop(key: str) -> Edit:
    return lambda data: data.pop(key)


PLAN_FAULTS: list[tuple[str, Edit, str]] = [
    ("wrong loop count", _set("fingerprint", "geometry", "loops")(3), "options name 5 cells, the geometry has 7"),
    ("missing cell", lambda d: d["options"].pop(), "options name 4 cells, the geometry has 5"),
    ("extra cell", lambda d: d["options"].append("int4"), "options name 6 cells, the geometry has 5"),
    ("no cells", _set("options")([]), "options name 0 cells"),
    ("unknown option", _set("options", 1)("in4"), "did you mean 'int4'"),
    ("option of another type", _set("options", 1)(4), "string"),
    ("options as text", _set("options")("int4"), "options"),
    ("final loop shared", _set("options", 4)("share"), "only looped cells before the final loop can share"),
    ("prelude shared", _set("options", 0)("share"), "only looped cells before the final loop can share"),
    # the target of cell L1.01's share is L2.01, which is shared itself
    ("share target shared", lambda d: d["options"].__setitem__(slice(1, 4), ["share", "int4", "share"]), "share"),
    ("negative tau", _set("tau")(-1), "tau"),
    ("NaN tau", _set("tau")(float("nan")), "tau"),
    ("huge tau", _set("tau")(1e9), "tau"),
    ("negative budget", _set("budget", "max_damage_nats")(-1e-3), "budget.max_damage_nats"),
    ("fractional bytes", _set("budget", "max_stored_bytes")(1.5), "budget.max_stored_bytes"),
    ("NaN prediction", _set("predicted", "damage_nats")(float("nan")), "predicted.damage_nats"),
    ("infinite measurement", _set("measured", "kl_nats")(float("inf")), "measured.kl_nats"),
    ("agreement above one", _set("measured", "top1_agreement")(1.5), "measured.top1_agreement"),
    ("unknown field", _set("prefill")("fast"), "prefill"),
    ("unknown geometry field", _set("fingerprint", "geometry", "experts")(8), "experts"),
    ("no geometry", lambda d: d["fingerprint"].pop("geometry"), "geometry"),
    ("heads that do not divide", _set("fingerprint", "geometry", "kv_heads")(4), "multiple of kv_heads"),
    ("zero heads", _set("fingerprint", "geometry", "kv_heads")(0), "kv_heads"),
    ("huge loops", _set("fingerprint", "geometry", "loops")(10**9), "loops"),
    (
        "millions of cells",
        lambda d: d["fingerprint"]["geometry"].update(loops=1024, layers=4096),
        "4194305 cells, at most 65536",
    ),
    ("loops as text", _set("fingerprint", "geometry", "loops")("2"), "loops"),
    ("loops as true", _set("fingerprint", "geometry", "loops")(True), "loops"),
    ("head size that cannot be coded", _set("fingerprint", "geometry", "head_dim")(80), "head size"),
    ("bad hash", _set("fingerprint", "weights_sha256")("abc"), "weights_sha256"),
    ("sink off the page grid", _set("policy", "sink_tokens")(33), "sink_tokens"),
    ("empty name", _set("name")(""), "name"),
    ("no options", _drop("options"), "options"),
    ("no policy", _drop("policy"), "policy"),
]


@pytest.mark.parametrize(("edit", "match"), [f[1:] for f in PLAN_FAULTS], ids=[f[0] for f in PLAN_FAULTS])
def test_broken_plans(edit: Edit, match: str, tmp_path: Path) -> None:
    data = copy.deepcopy(PLAN)
    edit(data)
    assert match in refuse(Plan.load, write(tmp_path, data), PlanFormatError)


def _add_option(name: str) -> Edit:
    """List ``name`` with int4's rows in both tables."""
    return lambda data: [data[key].update({name: data[key]["int4"]}) for key in ("damage_nats", "changed")]


PROFILE_FAULTS: list[tuple[str, Edit, str]] = [
    ("wrong loop count", _set("fingerprint", "geometry", "loops")(3), "int4: 5 cells, the geometry has 7"),
    ("missing cell", lambda d: d["damage_nats"]["int2"].pop(), "int2: 4 cells, the geometry has 5"),
    ("cell set to null", _set("damage_nats", "int4", 2)(None), "int4: cell L1.02 is missing"),
    ("share of the final loop", _set("damage_nats", "share", 4)([0.1, 0.1]), "share: cell L2.02 cannot share"),
    ("NaN damage", _set("damage_nats", "int4", 1)([float("nan"), 0.1]), "int4"),
    ("infinite damage", _set("damage_nats", "int4", 1)([float("inf"), 0.1]), "int4"),
    ("negative damage", _set("damage_nats", "int4", 1)([-1e-9, 0.1]), "L1.01 holds a damage that is not a finite"),
    ("damage as text", _set("damage_nats", "int4", 1)(["1e-3", 0.1]), "int4"),
    ("too few documents", _set("damage_nats", "int4", 1)([0.1]), "L1.01 has 1 documents, wanted 2"),
    (
        "unknown option",
        _add_option("int3"),
        "did you mean 'int",
    ),
    ("bf16 listed", _add_option("bf16"), "not listed"),
    ("tables that differ", lambda d: d["changed"].pop("int2"), "must list the same options"),
    ("no damages", lambda d: (d["damage_nats"].clear(), d["changed"].clear()), "lists no option"),
    ("no documents", _set("documents")([]), "documents"),
    ("NaN KL_share", _set("kl_share_nats")([float("nan"), 1.0]), "kl_share_nats"),
    ("short KL_share", _set("kl_share_nats")([1e-4]), "kl_share_nats"),
    ("document without positions", _set("documents", 0, "scored_positions")(0), "scored_positions"),
    ("damages as a list", _set("damage_nats")([]), "damage_nats"),
    ("no fingerprint", _drop("fingerprint"), "fingerprint"),
]


@pytest.mark.parametrize(("edit", "match"), [f[1:] for f in PROFILE_FAULTS], ids=[f[0] for f in PROFILE_FAULTS])
def test_broken_profiles(edit: Edit, match: str, tmp_path: Path) -> None:
    data = copy.deepcopy(PROFILE)
    edit(data)
    assert match in refuse(Profile.load, write(tmp_path, data), ProfileFormatError)


@pytest.mark.parametrize(("cls", "good"), [(Plan, PLAN), (Profile, PROFILE)])
@pytest.mark.parametrize(
    ("version", "match"),
    [(0, "make the file anew"), (2, "upgrade loopkv"), (10**30, "upgrade loopkv"), (-1, "make the file anew")],
)
def test_other_schema_versions(
    cls: type[Plan] | type[Profile], good: dict[str, Any], version: int, match: str, tmp_path: Path
) -> None:
    # Read before anything else: a newer file may have any other fields.
    data = {"schema_version": version, "from": "the future"}
    assert match in refuse(cls.load, write(tmp_path, data), PlanVersionError)
    assert match in refuse(cls.load, write(tmp_path, {**good, "schema_version": version}), PlanVersionError)


@pytest.mark.parametrize("version", ["1", 1.0, None, True, [1]])
def test_schema_versions_that_are_no_version(version: object, tmp_path: Path) -> None:
    refuse(Plan.load, write(tmp_path, {**PLAN, "schema_version": version}), PlanFormatError)
    refuse(Profile.load, write(tmp_path, {**PROFILE, "schema_version": version}), ProfileFormatError)
    del (data := dict(PLAN))["schema_version"]
    assert "schema_version" in refuse(Plan.load, write(tmp_path, data), PlanFormatError)


def test_a_plan_is_no_profile_and_the_reverse(tmp_path: Path) -> None:
    refuse(Profile.load, GOLDEN / "plan-v1.json", ProfileFormatError)
    refuse(Plan.load, GOLDEN / "profile-v1.json", PlanFormatError)
    assert isinstance(inspect_file(GOLDEN / "plan-v1.json").artifact, Plan)
    assert isinstance(inspect_file(GOLDEN / "profile-v1.json").artifact, Profile)
    refuse(inspect_file, write(tmp_path, {"schema_version": 1}), LoopKVError)


# -- broken files ---------------------------------------------------------------------------------------------------

BYTES: dict[str, bytes] = {
    "empty": b"",
    "truncated": (GOLDEN / "plan-v1.json").read_bytes()[:-20],
    "not UTF-8": b'{"name": "\xff\xfe"}',
    "UTF-16": json.dumps(PLAN).encode("utf-16"),
    "binary": bytes(range(256)) * 16,
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "two objects": b"{}{}",
    "deep": b'{"options":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep but within Python's limit": b'{"options":' + b"[" * 400 + b"]" * 400 + b',"schema_version":1}',
    "long integer": b'{"schema_version": ' + b"1" * 10_000 + b"}",
    "lone surrogate": json.dumps({**PLAN, "name": "\ud800"}).encode(),
    "huge number": json.dumps(PLAN).replace("0.005", "1e999").encode(),
    "duplicate key": json.dumps(PLAN).replace('{"schema_version": 1,', '{"schema_version": 1, "tau": 3.0,', 1).encode(),
}


@pytest.mark.parametrize("case", BYTES)
def test_files_that_are_no_artifact(case: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(BYTES[case])
    for load in (Plan.load, Profile.load, inspect_file):
        refuse(load, path)


def test_a_byte_order_mark_is_named(tmp_path: Path) -> None:
    (path := tmp_path / "file.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(PLAN).encode())
    refuse(Plan.load, path, PlanFormatError)


def test_huge_files_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    assert "bytes" in refuse(Plan.load, path, PlanFormatError)


def test_paths_that_are_no_readable_file(tmp_path: Path) -> None:
    assert "directory" in refuse(Plan.load, tmp_path, PlanFormatError)
    assert "No such file" in refuse(Plan.load, tmp_path / "absent.json", PlanFormatError)
    (tmp_path / "file").write_text("")
    refuse(Plan.load, tmp_path / "file" / "below.json", PlanFormatError)
    refuse(Plan.load, tmp_path / ("n" * 300), PlanFormatError)
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    refuse(Plan.load, tmp_path / "loop.json", PlanFormatError)
    with pytest.raises(PlanFormatError):
        Plan.load("nul\0byte.json")


def test_devices_and_pipes_neither_hang_nor_fill_the_memory(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    done: list[str] = []

    def attempt() -> None:
        done.append(refuse(Plan.load, tmp_path / "pipe.json", PlanFormatError))
        done.append(refuse(Profile.load, Path("/dev/zero"), ProfileFormatError))

    worker = threading.Thread(target=attempt, daemon=True)
    worker.start()
    worker.join(20)
    assert len(done) == 2, "reading a pipe or device hangs"


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an unprivileged user sees mode 000 (root, who may run the tests, can read anything)."""
    path = write(tmp_path, PLAN)
    path.chmod(0)
    if os.geteuid() == 0:

        def denied(*args: object, **kwargs: object) -> None:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "open", denied)
    assert "Permission denied" in refuse(Plan.load, path, PlanFormatError)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_mutation_loads_or_is_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Replace one random value of a good file by one random JSON value: a Plan / Profile or a LoopKVError, no more."""
    good, cls = data.draw(st.sampled_from([(PLAN, Plan), (PROFILE, Profile)]))
    mutant = copy.deepcopy(good)
    at: Any = mutant
    while True:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else list(range(len(at)))))
        if isinstance(at[key], dict | list) and at[key] and data.draw(st.booleans()):
            at = at[key]
            continue
        break
    leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    at[key] = data.draw(leaf | st.lists(leaf, max_size=3) | st.dictionaries(st.text(max_size=4), leaf, max_size=2))
    path = write(tmp_path_factory.mktemp("mutant"), mutant)
    try:
        cls.load(path)
    except LoopKVError as error:
        assert "\n" not in str(error)


# -- writing --------------------------------------------------------------------------------------------------------


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    plan = Plan.load(GOLDEN / "plan-v1.json")
    plan.save(path)
    before = path.read_bytes()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage_module.os, "fsync", full)
    with pytest.raises(LoopKVError, match="No space left"):
        plan.with_tau(None).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_killed_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"old")
    code = (
        "import os, signal, sys; from pathlib import Path; from loopkv.artifacts import storage\n"
        "storage.os.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"storage.write_atomically(Path({str(path)!r}), b'new')"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert path.read_bytes() == b"old"


def test_writing_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "plan.json", tmp_path / "folder", Path("/proc/nowhere/plan.json")):
        with pytest.raises(LoopKVError, match="cannot write"):
            write_atomically(path, b"x")


def test_a_replaced_file_keeps_readable_permissions(tmp_path: Path) -> None:
    write_atomically(tmp_path / "plan.json", b"x")
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o666 & ~umask


# -- use with another model -------------------------------------------------------------------------------------------


def test_plan_of_another_model_is_refused() -> None:
    plan = Plan.load(GOLDEN / "plan-v1.json")
    mine = plan.fingerprint
    plan.check_serves(mine)
    for field, value in (("loops", 3), ("layers", 3), ("kv_heads", 3), ("head_dim", 128), ("architecture", "huginn")):
        other = mine.model_copy(update={"geometry": mine.geometry.model_copy(update={field: value})})
        with pytest.raises(PlanMismatchError, match=field.replace("_", " ")):
            plan.check_serves(other, accept_weights=True)  # geometry always counts
    other = Fingerprint(name="tuned", geometry=mine.geometry, weights_sha256="0" * 64)
    with pytest.raises(PlanMismatchError, match="other weights"):
        plan.check_serves(other)
    plan.check_serves(other, accept_weights=True)
    plan.check_serves(Fingerprint(name="unknown", geometry=mine.geometry))
