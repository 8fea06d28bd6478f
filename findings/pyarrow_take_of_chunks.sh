#!/usr/bin/env bash
# One row taken of a pyarrow column of two chunks copies both chunks first.
#
# Version: pyarrow 26.0.1. ChunkedArray.take and Table.take on columns of fixed-size lists (features of images) or
# fixed-size binaries concatenate all chunks, and then take from the copy; with one chunk nothing is copied. So a batch
# that is taken from a memory-mapped file with several record batches reads and allocates all of it, whatever the number
# of rows. Array.take for each chunk, or numpy over its buffer, costs the rows alone.
#
# Seen 2026-11-28:
#   fixed_size_list<item: halffloat>[512]: bytes allocated to take 1 of 65,536 rows (67,108,864 bytes):
#     1 chunk: less than 10,000; 2 chunks: more than 67,000,000
#   fixed_size_binary[1024]: bytes allocated to take 1 of 65,536 rows (67,108,864 bytes):
#     1 chunk: less than 10,000; 2 chunks: more than 67,000,000
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy pyarrow==26.0.1
cat > "$work/take.py" <<'EOT'
import numpy as np
import pyarrow as pa

ROWS, WIDTH = 1 << 16, 512
buffer = pa.py_buffer(np.zeros((ROWS, WIDTH), np.float16))
values = pa.Array.from_buffers(pa.float16(), ROWS * WIDTH, [None, buffer])
columns = [
    pa.FixedSizeListArray.from_arrays(values, WIDTH),
    pa.FixedSizeBinaryArray.from_buffers(pa.binary(2 * WIDTH), ROWS, [None, buffer]),
]
for column in columns:
    print(f"{column.type}: bytes allocated to take 1 of {ROWS:,} rows ({buffer.size:,} bytes):")
    peaks = []
    for chunks in (1, 2):
        parts = [column.slice(first, ROWS // chunks) for first in range(0, ROWS, ROWS // chunks)]
        pool = pa.proxy_memory_pool(pa.system_memory_pool())
        pa.set_memory_pool(pool)
        assert len(pa.chunked_array(parts).take(pa.array([ROWS - 1]))) == 1
        peaks.append(pool.max_memory())
    few, many = peaks
    print(f"  1 chunk: {'less than 10,000' if few < 10_000 else few}; "
          f"2 chunks: {'more than 67,000,000' if many > 67_000_000 else many}")
    assert few < 10_000 and many > 67_000_000, peaks
EOT
"$work/venv/bin/python" "$work/take.py"
