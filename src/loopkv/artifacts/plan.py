"""The plan: one storage option per cell, with the budgets that chose it and the damage it predicts."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from loopkv.artifacts.fingerprint import Fingerprint
from loopkv.artifacts.storage import check_replaces, digest, parse_artifact, read_json, to_json, write_atomically
from loopkv.errors import LoopKVError, PlanFormatError, PlanMismatchError
from loopkv.footprint import Footprint, plan_footprint
from loopkv.options import Option, get_option
from loopkv.policy import Policy

MAX_NAME_LENGTH = 128
MAX_TAU = 1024


class Budget(BaseModel):
    """What the planner was asked for. ``goal`` names the objective; each limit is None where it does not bind."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    goal: str = Field(max_length=64)
    max_damage_nats: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    max_stored_bytes: int | None = Field(default=None, ge=0)
    max_read_bytes: int | None = Field(default=None, ge=0)


class Predicted(BaseModel):
    """Damage the profile predicts: the sum over cells, and the same times the paper's correction (appendix D)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    damage_nats: float = Field(ge=0, allow_inf_nan=False)
    corrected_nats: float = Field(ge=0, allow_inf_nan=False)
    kl_share_nats: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    profile_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Measured(BaseModel):
    """fp32 KL of the whole plan as measured, mean over documents with a bootstrap interval of the mean."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kl_nats: float = Field(ge=0, allow_inf_nan=False)
    kl_ci95_nats: tuple[float, float] = Field(strict=False)
    top1_agreement: float = Field(ge=0, le=1)
    documents_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    tau: float | None = Field(default=None, ge=0, allow_inf_nan=False)


class Plan(BaseModel):
    """One option per cell (cell order of the geometry), immutable.

    ``tau`` is the V-precision threshold in bits (paper section 3.3); None reads both value planes always.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    schema_version: int = 1
    name: str = Field(min_length=1, max_length=MAX_NAME_LENGTH)
    fingerprint: Fingerprint
    policy: Policy
    options: tuple[str, ...] = Field(strict=False)
    tau: float | None = Field(default=None, ge=0, le=MAX_TAU, allow_inf_nan=False)
    budget: Budget | None = None
    predicted: Predicted | None = None
    measured: Measured | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        cells = len(self.fingerprint.geometry.cells)
        if len(self.options) != cells:
            raise ValueError(f"options name {len(self.options)} cells, the geometry has {cells}")
        try:
            plan_footprint(self.fingerprint.geometry, self.cell_options, self.policy)
        except LoopKVError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def cell_options(self) -> tuple[Option, ...]:
        """The options as table rows, in cell order."""
        return tuple(get_option(name) for name in self.options)

    @cached_property
    def footprint(self) -> Footprint:
        """Bytes per history token with a two-byte exact dtype."""
        return self.footprint_at(2)

    def footprint_at(self, exact_itemsize: int) -> Footprint:
        """Bytes per history token when the engine's exact dtype has ``exact_itemsize`` bytes."""
        return plan_footprint(self.fingerprint.geometry, self.cell_options, self.policy, exact_itemsize)

    @property
    def shares(self) -> bool:
        """True where any cell reads the final loop's history."""
        return any(option.shares for option in self.cell_options)

    @cached_property
    def sha256(self) -> str:
        """Identity of what is executed: geometry, constants, options and tau (not name, budgets or measurements)."""
        payload: dict[str, Any] = {
            "geometry": self.fingerprint.geometry.model_dump(mode="json"),
            "policy": self.policy.model_dump(mode="json"),
            "options": list(self.options),
            "tau": self.tau,
        }
        return digest(payload)

    def check_serves(self, model: Fingerprint, *, accept_weights: bool = False) -> None:
        """Refuse to run on another geometry or, unless ``accept_weights``, other weights (PlanMismatchError)."""
        self.fingerprint.check_serves(model, f"plan {self.name!r}", accept_weights=accept_weights)

    def predicted_matches(self, profile_sha256: str) -> None:
        """Refuse to compare the prediction with another profile than the one it came from."""
        if self.predicted is not None and self.predicted.profile_sha256 != profile_sha256:
            raise PlanMismatchError(
                f"plan {self.name!r} was made from another profile",
                got=self.predicted.profile_sha256[:12],
                wanted=profile_sha256[:12],
            )

    def with_measured(self, measured: Measured) -> Plan:
        """The same plan with a measurement attached."""
        return self.model_copy(update={"measured": measured})

    def with_name(self, name: str) -> Plan:
        """The same plan under another name."""
        if not 1 <= len(name) <= MAX_NAME_LENGTH:
            raise PlanFormatError("plan name", got=f"{len(name)} characters", wanted=f"1 to {MAX_NAME_LENGTH}")
        if not _is_unicode(name):  # it would be written, and never read again
            raise PlanFormatError("plan name", got=ascii(name)[:80], wanted="valid Unicode")
        return self.model_copy(update={"name": name})

    def with_tau(self, tau: float | None) -> Plan:
        """The same options read with another V-precision threshold; a measurement of the old one is dropped."""
        if tau is not None and not 0 <= tau <= MAX_TAU:
            raise PlanFormatError("tau", got=tau, wanted=f"a number of bits from 0 to {MAX_TAU}, or none")
        return self.model_copy(update={"tau": tau, "measured": None if tau != self.tau else self.measured})

    @classmethod
    def load(cls, path: Path | str) -> Plan:
        """Read and check a plan file.

        Raises:
            PlanFormatError: anything but a well-formed plan (the nearest option name is suggested).
            PlanVersionError: another schema version.
        """
        data = read_json(Path(path), PlanFormatError, "plan")
        return parse_artifact(cls, data, PlanFormatError, f"plan {path}")

    def save(self, path: Path | str) -> None:
        """Write the plan; a crash leaves the old file or the new one, and a file of the other kind is refused."""
        check_replaces(path, "plan")
        write_atomically(Path(path), to_json(self))


def _is_unicode(text: str) -> bool:
    """False for lone surrogates, which stand for bytes of an argument that are not UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
