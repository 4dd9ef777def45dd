"""The safetensors of a model folder by tensor name: headers are read at once, data when it is asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loopkv.artifacts.storage import read_json
from loopkv.errors import ModelFormatError

INDEX_FILE = "model.safetensors.index.json"
WEIGHT_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def weight_files(folder: Path) -> list[Path]:
    """Weight files of a folder: the shards of its index, or all safetensors where there is none.

    Raises:
        ModelFormatError: no weights, a shard that is missing or outside the folder, a broken index.
    """
    index = folder / INDEX_FILE
    if index.exists():
        shards = read_json(index, ModelFormatError, "weights index").get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise ModelFormatError(f"{index}", got="no weight_map", wanted="a safetensors index")
        files = [folder / name for name in sorted(set(shards.values()))]
        if any(file.parent != folder for file in files):
            raise ModelFormatError(f"{index}", got="a shard outside the model folder")
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelFormatError(f"model {folder}", got="no *.safetensors file", wanted="safetensors weights")
    for file in files:
        if not file.is_file():
            raise ModelFormatError(f"model {folder}", got=f"no {file.name}", wanted="every shard of the index")
    return files


def refuse_unknown(names: Collection[str], what: str) -> None:
    """Refuse tensors that the forward pass would leave out: the model would be another than the one trained.

    Raises:
        ModelFormatError: there are any; names one and how many.
    """
    if names:
        count = f"{len(names)} tensor{'s' * (len(names) > 1)}"
        raise ModelFormatError(
            what,
            got=f"{count} that the forward pass leaves out, such as {min(names)[:120]}",
            wanted="those of Ouro as its config.json describes it",
            hint="an Ouro variant with other parts is not supported; check config.json (number of layers, biases)",
        )


class Checkpoint:
    """Tensors of a model folder; a context that keeps the files open.

    Args:
        folder: the model folder.

    Raises:
        ModelFormatError: no or broken weight files, one tensor in two of them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open = contextlib.ExitStack()
        self._holder: dict[str, Any] = {}
        files: dict[str, Path] = {}
        try:
            for file in weight_files(folder):
                try:
                    handle = self._open.enter_context(safe_open(file, framework="pt"))
                    names = list(handle.keys())
                except (SafetensorError, OSError) as problem:
                    got = str(problem)[:120]
                    raise ModelFormatError(f"weights {file}", got=got, wanted="a safetensors file") from None
                for name in names:
                    if name in files:
                        raise ModelFormatError(
                            f"weights of {folder}: {name}",
                            got=f"{files[name].name} and {file.name}",
                            wanted="one file that holds it",
                            hint="keep one set of weights in the folder",
                        )
                    files[name], self._holder[name] = file, handle
        except BaseException:
            self._open.close()
            raise

    def __contains__(self, name: str) -> bool:
        return name in self._holder

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files; tensors taken stay usable."""
        self._open.close()

    def check_names(self, wanted: Collection[str], is_unused: Callable[[str], bool]) -> None:
        """Refuse a checkpoint that lacks tensors, or holds some that the forward pass would leave out.

        Args:
            wanted: every tensor that the forward pass reads.
            is_unused: whether a tensor has no part in it.

        Raises:
            ModelFormatError: names the first such tensor and how many there are.
        """
        for name in wanted:
            if name not in self._holder:
                raise ModelFormatError(f"weights of {self.folder}", got=f"no tensor {name}", wanted="all of them")
        known = frozenset(wanted)
        refuse_unknown([n for n in self._holder if n not in known and not is_unused(n)], f"weights of {self.folder}")

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor called ``name``, of ``shape``, with finite values.

        Raises:
            ModelFormatError: it is none of that.
        """
        where = f"weights of {self.folder}"
        if name not in self._holder:
            raise ModelFormatError(where, got=f"no tensor {name}", wanted=f"shape {list(shape)}")
        holder = self._holder[name]
        found = tuple(holder.get_slice(name).get_shape())
        if found != shape:
            raise ModelFormatError(f"{where}: {name}", got=list(found), wanted=list(shape))
        try:
            tensor: Tensor = holder.get_tensor(name)
        except (SafetensorError, OSError) as problem:
            raise ModelFormatError(f"{where}: {name}", got=str(problem)[:120], wanted="a tensor") from None
        if tensor.dtype not in WEIGHT_DTYPES:  # 8-bit floats come with scales, without which they are other weights
            got = str(tensor.dtype).removeprefix("torch.")
            raise ModelFormatError(f"{where}: {name}", got=got, wanted="floats of 16, 32 or 64 bits")
        if not bool(torch.isfinite(tensor).all()):
            raise ModelFormatError(f"{where}: {name}", got="values that are not finite", wanted="floats")
        return tensor
