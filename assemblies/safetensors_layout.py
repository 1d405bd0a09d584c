"""safetensors files whose layout is known before their contents: the header, and rows put in place.

The format: 8 bytes, little endian, with the length of the header; the header, in JSON; the tensors
one after the other.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
}


class Layout:
    """Dtype and shape of every tensor of a file, by name, and the `settings` in its metadata.

    The library safetensors writes whole tensors only; what is laid out here it reads.
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        settings: Mapping[str, Any],
    ) -> None:
        # the widest first, so that each begins at a multiple of its width
        order = sorted(tensors, key=lambda name: -tensors[name][0].itemsize)
        self.tensors = {name: tensors[name] for name in order}
        self.settings = dict(settings)
        self._starts: dict[str, int] = {}
        entries: dict[str, Any] = {
            "__metadata__": {"format": "pt", "settings": json.dumps(self.settings)}
        }
        end = 0
        for name, (dtype, shape) in self.tensors.items():
            start, end = end, end + dtype.itemsize * math.prod(shape)
            self._starts[name] = start
            offsets = [start, end]
            entries[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": offsets}
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.size = len(self.header) + end

    def put(self, file: IO[bytes], name: str, row: int, rows: Tensor) -> None:
        """Write `rows` at `row` of the tensor `name` into `file`."""
        dtype, shape = self.tensors[name]
        assert rows.shape[1:] == shape[1:]
        assert 0 <= row <= shape[0] - len(rows)
        rows = rows.detach().to("cpu", dtype).contiguous()
        if rows.numel():
            width = dtype.itemsize * math.prod(shape[1:])
            file.seek(len(self.header) + self._starts[name] + row * width)
            file.write((ctypes.c_ubyte * (len(rows) * width)).from_address(rows.data_ptr()))


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in the metadata of a file that was laid out here.

    Raises:
        ValueError: it is another file.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(min(length, 10**8))
    try:
        settings = json.loads(json.loads(text)["__metadata__"]["settings"])
        if isinstance(settings, dict):
            return settings
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{path} is not a file of embeddings")
