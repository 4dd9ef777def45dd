"""Reading hostile JSON and writing files that are either whole or absent."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from loopkv.errors import LoopKVError, PlanVersionError
from loopkv.paths import check_input_file

MAX_ARTIFACT_BYTES = 64 << 20
_Model = TypeVar("_Model", bound=BaseModel)


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` so that a crash leaves the old file or the new one, never a part."""
    path = Path(path)
    try:
        path = path.resolve() if path.is_symlink() else path  # the file behind a link, not the link
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as error:
        raise LoopKVError(f"cannot write {path}", got=error.strerror, hint="choose a writable folder") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # noqa: PTH101 - mkstemp made it private
        os.replace(temporary, path)  # noqa: PTH105
    except OSError as error:
        raise LoopKVError(f"cannot write {path}", got=error.strerror, hint="choose a writable file") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)  # noqa: PTH108


def read_json(path: Path, error: type[LoopKVError], what: str) -> dict[str, Any]:
    """The JSON object in ``path``; anything else raises ``error`` with one clear sentence."""
    path = Path(path)
    size_bytes = check_input_file(path, what, error, "a JSON file")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_ARTIFACT_BYTES + 1) if size_bytes <= MAX_ARTIFACT_BYTES else None
        if content is None or len(content) > MAX_ARTIFACT_BYTES:
            raise error(f"{what} {path}", got=f"{size_bytes} bytes", wanted=f"<= {MAX_ARTIFACT_BYTES}")
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise error(f"{what} {path}", got="bytes that are not UTF-8", wanted="a JSON file") from None
    except OSError as problem:
        raise error(f"{what} {path}", got=problem.strerror, wanted="a readable JSON file") from None
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as problem:
        raise error(f"{what} {path}", got=f"broken JSON ({str(problem)[:80]})", wanted="a JSON object") from None
    if not isinstance(data, dict):
        raise error(f"{what} {path}", got=f"a JSON {type(data).__name__}", wanted="a JSON object")
    return data


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are distinct: of two values for one key, either may be the one that was meant."""
    data = dict(pairs)
    if len(data) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:40]!r} twice in one object")
    return data


def artifact_kind(data: dict[str, Any]) -> str | None:
    """``profile`` or ``plan`` by the field that makes it one; None for anything else."""
    return "profile" if "damage_nats" in data else "plan" if "options" in data else None


def check_replaces(path: Path | str | None, kind: str) -> None:
    """Refuse to write a ``kind`` over an artifact of the other kind: minutes of measuring would be lost unseen.

    Anything else at ``path`` (nothing, a broken file, None) passes.

    Raises:
        LoopKVError: ``path`` holds a profile where a plan is to be written, or the reverse.
    """
    if path is None or not Path(path).is_file():
        return
    try:
        found = artifact_kind(read_json(Path(path), LoopKVError, "output"))
    except LoopKVError:
        return
    if found not in (None, kind):
        raise LoopKVError(
            f"cannot write a {kind} to {path}",
            got=f"a {found} there",
            wanted=f"a new file or a {kind}",
            hint="choose another --output, or move it away",
        )


def parse_artifact(model: type[_Model], data: dict[str, Any], error: type[LoopKVError], what: str) -> _Model:
    """Validate ``data`` as ``model``; schema versions first, then the first broken field, as one sentence."""
    kind, mine = artifact_kind(data), model.__name__.lower()
    if kind is not None and kind != mine:
        making = {"plan": "`loopkv plan PROFILE` makes one of it", "profile": "`loopkv profile MODEL` makes one"}
        raise error(what, got=f"a {kind}", wanted=f"a {mine}", hint=making.get(mine))
    version = data.get("schema_version")
    wanted = model.model_fields["schema_version"].default
    if type(version) is not int:
        raise error(what, got=f"schema_version {version!r}"[:80], wanted=f"schema_version {wanted}")
    if version != wanted:
        newer = version > wanted
        raise PlanVersionError(
            what,
            got=f"schema_version {version}",
            wanted=f"schema_version {wanted}",
            hint="upgrade loopkv" if newer else "make the file anew with this release",
        )
    try:
        return model.model_validate_json(json.dumps(data))
    except (ValidationError, ValueError) as problem:
        if not isinstance(problem, ValidationError):
            raise error(what, got=str(problem)[:200]) from None
        raise _first_fault(problem, error, what) from None


def _first_fault(problem: ValidationError, error: type[LoopKVError], what: str) -> LoopKVError:
    """The first broken field as one sentence; what our own validators say needs no dump of the whole object."""
    first = problem.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    place = f"{what}: {where}" if where else what
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return error(f"{place}: {message}")
    if first["type"] == "missing":
        return error(place, got="nothing", wanted="this field")
    if first["type"] == "extra_forbidden":
        return error(place, got="a field that this release does not know", wanted="none but the schema's")
    got = repr(first.get("input"))
    return error(
        place, got=got if len(got) <= 80 else f"{got[:77]}...", wanted=message.removeprefix("Input should be ")
    )


def to_json(model: BaseModel) -> bytes:
    """Canonical, readable JSON of an artifact (UTF-8, keys in field order, finite numbers only)."""
    return (json.dumps(model.model_dump(mode="json"), indent=1, allow_nan=False) + "\n").encode()


def digest(payload: Any) -> str:
    """SHA-256 (hex) of the canonical JSON of ``payload``."""
    text = json.dumps(payload, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
