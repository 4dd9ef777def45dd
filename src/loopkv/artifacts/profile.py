"""The profile: how much each cell suffers from each option, measured once per model."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from loopkv.artifacts.fingerprint import Fingerprint
from loopkv.artifacts.storage import check_replaces, digest, parse_artifact, read_json, to_json, write_atomically
from loopkv.errors import LoopKVError, ProfileFormatError
from loopkv.options import OPTIONS, get_option
from loopkv.policy import Policy

FloatArray = npt.NDArray[np.float64]


class DocumentInfo(BaseModel):
    """One document of a profile: where it came from and how many positions were scored."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    source: str = Field(max_length=512)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    tokens: int = Field(ge=1)
    scored_positions: int = Field(ge=1)


class Profile(BaseModel):
    """Damage of every cell alone under every option, per document.

    ``damage_nats[option][cell][document]`` is the mean KL(exact || perturbed) in nats per scored position, fp32
    activations; None where the option has no meaning for the cell. ``changed[option][cell][document]`` is the share of
    scored positions whose most likely token changed. bf16 damages nothing and is not listed.
    ``kl_share_nats`` is the KL of whole-loop sharing of the last-but-one loop in exact precision (paper's KL_share),
    None for a model of one loop.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    schema_version: int = 1
    fingerprint: Fingerprint
    policy: Policy
    documents: tuple[DocumentInfo, ...] = Field(min_length=1, strict=False)
    damage_nats: dict[str, tuple[tuple[float, ...] | None, ...]] = Field(strict=False)
    changed: dict[str, tuple[tuple[float, ...] | None, ...]] = Field(strict=False)
    kl_share_nats: tuple[float, ...] | None = Field(default=None, strict=False)
    provenance: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        geometry = self.fingerprint.geometry
        cells, documents = len(geometry.cells), len(self.documents)
        if set(self.damage_nats) != set(self.changed):
            raise ValueError("damage_nats and changed must list the same options")
        if not self.damage_nats:
            raise ValueError("damage_nats lists no option")
        for name, table in (*self.damage_nats.items(), *self.changed.items()):
            try:
                get_option(name)
            except LoopKVError as error:
                raise ValueError(str(error)) from None
            if name == "bf16":
                raise ValueError("bf16 damages nothing and is not listed")
            if len(table) != cells:
                raise ValueError(f"{name}: {len(table)} cells, the geometry has {cells}")
            for index, row in enumerate(table):
                label = geometry.cells[index].label
                applies = not OPTIONS[name].shares or geometry.source_of(index) is not None
                if row is None:
                    if applies:
                        raise ValueError(f"{name}: cell {label} is missing")
                    continue
                if not applies:
                    raise ValueError(f"{name}: cell {label} cannot share")
                if len(row) != documents:
                    raise ValueError(f"{name}: cell {label} has {len(row)} documents, wanted {documents}")
                if not all(math.isfinite(value) and value >= 0.0 for value in row):
                    raise ValueError(f"{name}: cell {label} holds a damage that is not a finite number >= 0")
        if self.kl_share_nats is not None and (
            len(self.kl_share_nats) != documents or not all(math.isfinite(v) and v >= 0 for v in self.kl_share_nats)
        ):
            raise ValueError("kl_share_nats must hold one finite number >= 0 per document")
        return self

    @cached_property
    def kl_share(self) -> float | None:
        """KL_share in nats, mean over documents."""
        return None if self.kl_share_nats is None else math.fsum(self.kl_share_nats) / len(self.kl_share_nats)

    @cached_property
    def sha256(self) -> str:
        """Hash of what was measured (provenance left out)."""
        return digest(self.model_dump(mode="json", exclude={"provenance"}))

    def damage(self, option: str) -> tuple[float | None, ...]:
        """Mean damage in nats of every cell under ``option`` (0 for bf16, None where it has no meaning)."""
        if option == "bf16":
            return (0.0,) * len(self.fingerprint.geometry.cells)
        return tuple(None if r is None else math.fsum(r) / len(r) for r in self.damage_nats[option])

    @classmethod
    def load(cls, path: Path | str) -> Profile:
        """Read and check a profile file.

        Raises:
            ProfileFormatError: anything but a well-formed profile.
            PlanVersionError: another schema version.
        """
        data = read_json(Path(path), ProfileFormatError, "profile")
        return parse_artifact(cls, data, ProfileFormatError, f"profile {path}")

    def save(self, path: Path | str) -> None:
        """Write the profile; a crash leaves the old file or the new one, and a file of the other kind is refused."""
        check_replaces(path, "profile")
        write_atomically(Path(path), to_json(self))
