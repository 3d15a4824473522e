"""NumPy arrays and texts as Arrow arrays, by their buffers.

``pyarrow.array`` imports pandas at its first call, to know its types: a third of a second in every run, which needs
nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa


def numbers(values: np.ndarray, absent: np.ndarray | None = None) -> pa.Array:
    """A vector of numbers -> an array of its type, null where ``absent``."""
    if values.dtype == bool:
        bits = pa.py_buffer(np.packbits(values, bitorder="little"))
        return pa.Array.from_buffers(pa.bool_(), len(values), [None, bits])
    values = np.ascontiguousarray(values)
    mask = None
    if absent is not None and absent.any():
        mask = pa.py_buffer(np.packbits(~absent, bitorder="little"))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [mask, pa.py_buffer(values)])


def measured(values: np.ndarray) -> pa.Array:
    """Numbers of which NaN says that they were not measured: null."""
    return numbers(values, np.isnan(values) if values.dtype.kind == "f" else None)


def texts(values: Sequence[str]) -> pa.Array:
    """Texts, most of them repeated -> a dictionary array."""
    known = list(dict.fromkeys(values))
    place = {text: number for number, text in enumerate(known)}
    encoded = [text.encode() for text in known]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    words = pa.Array.from_buffers(pa.string(), len(known), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))])
    return pa.DictionaryArray.from_arrays(numbers(np.array([place[text] for text in values], np.int32)), words)


def rows(found: Iterable[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Mappings of name to number -> a table; a name that a row does not have is null."""
    found = list(found)
    arrays = []
    for field in schema:
        column = [row.get(field.name) for row in found]
        absent = np.array([value is None for value in column], bool)
        values = np.array([0 if value is None else value for value in column], field.type.to_pandas_dtype())
        arrays.append(numbers(values, absent))
    return pa.Table.from_arrays(arrays, schema=schema)
