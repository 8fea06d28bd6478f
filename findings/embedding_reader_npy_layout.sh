#!/usr/bin/env bash
# embedding-reader, and so autofaiss and clip-retrieval, read features of Fortran order, or of mixed dtypes, as other numbers.
#
# Versions: embedding-reader 1.8.1, autofaiss 2.18.0, numpy 1.26.4. The reader parses headers of .npy files by a regular expression
# (numpy_reader.py: read_numpy_header) and reads raw bytes at offsets. It does not look at `fortran_order`, which np.save sets
# for a matrix that was computed as (width, n) and transposed, or that came out of a table of columns: rows of the right shape,
# dtype and range, with the numbers of other samples. It also takes the dtype of the first file for all: where that has float16
# and a later one float32, the bytes of the later one's first half are read as twice as many halves, among them NaN, after
# which the index finds no row at all. Nothing is raised, and search is at chance. np.load reads all of these files. Save
# np.ascontiguousarray(features, dtype), with one dtype for all files.
#
# Seen 2026-11-29 (2,000 vectors of length 1 in two files): share that finds itself in autofaiss's index, rows that are as np.load's
#   C order: 1.000, 2000; Fortran order: 0.001, 0; float16, then float32: 0.001, 1000
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy==1.26.4 pandas==2.3.3 pyarrow==18.1.0 embedding-reader==1.8.1 \
    autofaiss==2.18.0 faiss-cpu==1.15.1
cat > "$work/read.py" <<'EOT'
import sys
from pathlib import Path

import faiss
import numpy as np
from autofaiss import build_index
from embedding_reader import EmbeddingReader

rng = np.random.default_rng(0)
vectors = rng.normal(size=(2000, 64)).astype(np.float32)
vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
first, second = np.split(vectors, 2)
layouts = {
    "C order": (first, second),
    "Fortran order": (np.asfortranarray(first), np.asfortranarray(second)),
    "float16, then float32": (first.astype(np.float16), second),
}
found = []
for name, files in layouts.items():
    folder = Path(sys.argv[1]) / name.replace(" ", "_").replace(",", "")
    folder.mkdir()
    for number, rows in enumerate(files):
        np.save(folder / f"{number}.npy", rows)
    loaded = np.concatenate([np.load(path) for path in sorted(folder.iterdir())]).astype(np.float32)
    assert np.abs(loaded - vectors).max() < 1e-3
    reader = EmbeddingReader(str(folder), file_format="npy")
    read = np.concatenate([batch for batch, _ in reader(batch_size=500, show_progress=False)])
    assert read.shape == vectors.shape
    same = int((read.astype(np.float32) == loaded).all(axis=1).sum())
    index, _ = build_index(str(folder), index_key="Flat", save_on_disk=False, metric_type="ip", verbose=40)
    nearest = index.search(vectors, 1)[1][:, 0]
    found.append((name, float((nearest == np.arange(2000)).mean()), same))
print("; ".join(f"{name}: {share:.3f}, {same}" for name, share, same in found))
assert found[0][1:] == (1.0, 2000) and found[1][1] < 0.01 and found[1][2] == 0 and found[2][2] == 1000 and found[2][1] < 0.51
EOT
cd "$work"
OMP_NUM_THREADS=1 venv/bin/python -W ignore read.py "$work" 2> log || { tail -20 log; exit 1; }
