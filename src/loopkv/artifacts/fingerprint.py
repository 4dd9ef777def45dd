"""What a profile or plan says about the model it was made for."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from loopkv.errors import PlanMismatchError
from loopkv.geometry import Geometry

Sha256 = str


class Fingerprint(BaseModel):
    """Identity of a model: its geometry always, its weights and tokenizer when known (SHA-256, hex)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(max_length=512)
    geometry: Geometry
    weights_sha256: Sha256 | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    tokenizer_sha256: Sha256 | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")

    def check_serves(self, model: Fingerprint, what: str, *, accept_weights: bool = False) -> None:
        """Refuse to use this artifact with ``model``.

        Raises:
            PlanMismatchError: another geometry (always), or other weights unless ``accept_weights``.
        """
        mine, theirs = self.geometry, model.geometry
        for field in Geometry.model_fields:
            a, b = getattr(mine, field), getattr(theirs, field)
            if a != b:
                raise PlanMismatchError(
                    f"{what} was made for another geometry: {field.replace('_', ' ')}",
                    got=a,
                    wanted=b,
                    hint="profile and plan this model",
                )
        known = self.weights_sha256 is not None and model.weights_sha256 is not None
        if known and self.weights_sha256 != model.weights_sha256 and not accept_weights:
            raise PlanMismatchError(
                f"{what} was made for other weights",
                got=f"{self.name} ({str(self.weights_sha256)[:12]})",
                wanted=f"{model.name} ({str(model.weights_sha256)[:12]})",
                hint="profile this checkpoint, or pass accept_weights to reuse the plan of a sibling checkpoint",
            )
