"""Rollouts in parquet files: a row each, token ids and masks in list columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

MAGIC = b"PAR1"
_BATCH_ROWS = 4096


def read_rows(file: BinaryIO, fields: frozenset[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered rows, from 1, of the columns named in `fields`; other columns are not read.

    A list column of integers or booleans gives numpy arrays, views of the file's buffers, anything
    else what pyarrow makes of it in Python.

    Raises:
        ImportError: pyarrow is not installed.
        ValueError: no parquet file, or a damaged one.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
        names = table.schema_arrow.names
        columns = [name for name in names if name in fields]
        if not columns:
            raise ValueError(
                f"has none of the columns {', '.join(sorted(fields))}; it has "
                f"{', '.join(names) or 'none'}"
            )
        number = 0
        for batch in table.iter_batches(_BATCH_ROWS, columns=columns):
            values = [_values(batch.column(name)) for name in columns]
            for row in zip(*values, strict=True):
                number += 1
                yield number, dict(zip(columns, row, strict=True))
    except (pa.ArrowException, OSError) as problem:
        raise ValueError(f"cannot be read as parquet: {problem}") from None


def _values(column: Any) -> list[Any]:
    import pyarrow as pa

    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list or not (
        pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)
    ):
        return column.to_pylist()
    elements = column.values
    if elements.null_count:
        return column.to_pylist()
    flat = elements.to_numpy(zero_copy_only=False)
    offsets = column.offsets.to_pylist()
    valid = column.is_valid().to_pylist()
    return [flat[offsets[i] : offsets[i + 1]] if valid[i] else None for i in range(len(column))]
