"""The shape of a looped model as far as its KV cache is concerned: loops, layers, heads and the grid of cells."""

from __future__ import annotations

from functools import cached_property
from typing import Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Section = Literal["prelude", "loop", "coda"]
MAX_CELLS = 1 << 16


class Cell(NamedTuple):
    """The KV store of one attention layer in one loop (0-based), or of one layer outside the loop."""

    section: Section
    loop: int
    layer: int

    @property
    def label(self) -> str:
        """1-based name for people: ``L3.07`` is loop 3, layer 7; ``pre.1`` and ``coda.2`` lie outside the loop."""
        if self.section == "loop":
            return f"L{self.loop + 1}.{self.layer + 1:02d}"
        return f"{'pre' if self.section == 'prelude' else 'coda'}.{self.layer + 1}"


class Geometry(BaseModel):
    """Everything about a model that decides the size and numbering of its cache.

    ``sliding_*`` name (0-based) layers with a sliding window of their own: they keep the engine's cache and have no
    cell. Cells are numbered prelude first, then loop-major, then coda.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    architecture: str = Field(min_length=1, max_length=64)
    loops: int = Field(ge=1, le=1024)
    layers: int = Field(ge=1, le=4096)
    query_heads: int = Field(ge=1, le=4096)
    kv_heads: int = Field(ge=1, le=4096)
    head_dim: int = Field(ge=1, le=4096)
    prelude_layers: int = Field(default=0, ge=0, le=4096)
    coda_layers: int = Field(default=0, ge=0, le=4096)
    sliding_prelude: tuple[int, ...] = Field(default=(), strict=False)
    sliding_looped: tuple[int, ...] = Field(default=(), strict=False)
    sliding_coda: tuple[int, ...] = Field(default=(), strict=False)

    @model_validator(mode="after")
    def _check(self) -> Self:
        layers = self.loops * self.layers + self.prelude_layers + self.coda_layers
        if layers > MAX_CELLS:  # checked before anything lists them: a small hostile file must not fill the memory
            raise ValueError(f"{layers} cells, at most {MAX_CELLS} are supported")
        if self.query_heads % self.kv_heads:
            raise ValueError(f"query_heads ({self.query_heads}) must be a multiple of kv_heads ({self.kv_heads})")
        for name, layers, sliding in (
            ("sliding_prelude", self.prelude_layers, self.sliding_prelude),
            ("sliding_looped", self.layers, self.sliding_looped),
            ("sliding_coda", self.coda_layers, self.sliding_coda),
        ):
            if list(sliding) != sorted(set(sliding)) or any(not 0 <= layer < layers for layer in sliding):
                raise ValueError(f"{name} must be increasing layer numbers below {layers}, got {sliding}")
        return self

    @property
    def group_queries(self) -> int:
        """G, the query heads that read one kv head."""
        return self.query_heads // self.kv_heads

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """All cells in their one order: prelude, loop-major, coda."""
        prelude = [Cell("prelude", 0, i) for i in range(self.prelude_layers) if i not in self.sliding_prelude]
        looped = [i for i in range(self.layers) if i not in self.sliding_looped]
        coda = [Cell("coda", 0, i) for i in range(self.coda_layers) if i not in self.sliding_coda]
        return tuple(prelude + [Cell("loop", t, i) for t in range(self.loops) for i in looped] + coda)

    @cached_property
    def _index(self) -> dict[Cell, int]:
        return {cell: i for i, cell in enumerate(self.cells)}

    def index(self, cell: Cell) -> int:
        """Position of ``cell`` in ``cells``."""
        return self._index[cell]

    def source_of(self, index: int) -> int | None:
        """The final loop's cell of the same layer, or None where sharing has no meaning (final loop, prelude, coda)."""
        cell = self.cells[index]
        if cell.section != "loop" or cell.loop == self.loops - 1:
            return None
        return self.index(Cell("loop", self.loops - 1, cell.layer))

    @cached_property
    def source_cells(self) -> tuple[int, ...]:
        """Indices of the final loop's cells, which shared cells read (empty for a model of one loop)."""
        return tuple(sorted({s for i in range(len(self.cells)) if (s := self.source_of(i)) is not None}))

    def loop_cells(self, loop: int) -> tuple[int, ...]:
        """Indices of the cells of one loop (0-based)."""
        return tuple(i for i, cell in enumerate(self.cells) if cell.section == "loop" and cell.loop == loop)
