"""The file that `embed_fasta` has written."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from torch import Tensor

from brickwork.assemblies.checkpoint_files import import_safetensors
from brickwork.assemblies.safetensors_layout import read_settings


class ProteinEmbeddings:
    """The file that `embed_fasta` has written; embeddings are read when they are asked for.

    `ids` of the N records, in the order of the FASTA file; `lengths` (N,), residues of each;
    `records` (N,), the place of each in the FASTA file, from 0, which differs from its place here
    only behind records that were skipped; `layers`, that are there.

    Raises:
        ImportError: safetensors is not installed.
        OSError: the file cannot be read.
        ValueError: it is another kind of file.
    """

    def __init__(self, file: str | os.PathLike[str]) -> None:
        safetensors = import_safetensors()
        self.settings = read_settings(Path(file))
        self._file = safetensors.safe_open(str(file), framework="pt")
        text: Tensor = self._file.get_tensor("ids")
        self.ids = ctypes.string_at(text.data_ptr(), len(text)).decode().split("\n")
        self.lengths: Tensor = self._file.get_tensor("lengths")
        self.records: Tensor = self._file.get_tensor("records")
        self.layers: tuple[int, ...] = tuple(self.settings["layers"])
        self._starts = (self.lengths.cumsum(0) - self.lengths).tolist()

    def __len__(self) -> int:
        return len(self.ids)

    def mean(self, *, layer: int | None = None) -> Tensor:
        """(N, C): the mean over residues of each record; `layer` by default the last there is."""
        return self._file.get_tensor(self._name("mean", layer))

    def residues(self, index: int, *, layer: int | None = None) -> Tensor:
        """(L, C): every residue of record `index` in `ids`."""
        if not 0 <= index < len(self):
            raise ValueError(f"index must be in [0, {len(self)}), got {index}")
        start = self._starts[index]
        rows = self._file.get_slice(self._name("residues", layer))
        return rows[start : start + int(self.lengths[index])]

    def _name(self, kind: str, layer: int | None) -> str:
        name = f"{kind}.{self.layers[-1] if layer is None else layer}"
        if name not in self._file.keys():  # noqa: SIM118
            raise ValueError(f"the file has no {name}, only {sorted(self._file.keys())}")
        return name
