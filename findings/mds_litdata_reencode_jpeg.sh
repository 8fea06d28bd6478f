#!/usr/bin/env bash
# The `jpeg` encodings of mosaicml-streaming and litdata keep a JPEG's bytes only if Pillow opened it from a path.
#
# Versions: mosaicml-streaming 0.13.0, litdata 0.2.76, pillow 12.3.0. An image that Pillow opened from memory, as it
# comes out of a tar, a table or a download, is encoded anew at Pillow's quality 75 with halved chroma, in silence: the
# bytes shrink to a quarter, and the picture loses detail that no later setting brings back. Write the bytes themselves
# (`bytes` columns).
#
# Seen 2026-11-28 (256 px, quality 95): 29,740 bytes from a path in both; 7,399 bytes from memory in both
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.15.0 torchvision==0.29.2 pillow==12.3.0 mosaicml-streaming==0.13.0 litdata==0.2.76
"$work/venv/bin/python" -W ignore - "$work" <<'EOF'
import io
import sys
from pathlib import Path

import numpy as np
from litdata.streaming.serializers import JPEGSerializer
from PIL import Image
from streaming.base.format.mds.encodings import JPEG

walk = np.random.default_rng(0).normal(size=(256, 256, 3)).cumsum(0).cumsum(1)
pixels = ((walk - walk.min()) / np.ptp(walk) * 255).astype("uint8")
memory = io.BytesIO()
Image.fromarray(pixels).save(memory, "JPEG", quality=95, subsampling=0)
raw = memory.getvalue()
path = Path(sys.argv[1]) / "image.jpg"
path.write_bytes(raw)

encoders = {"mosaicml-streaming": JPEG().encode, "litdata": lambda image: JPEGSerializer().serialize(image)[0]}
for name, encode in encoders.items():
    kept, anew = encode(Image.open(path)), encode(Image.open(io.BytesIO(raw)))
    print(f"{name}: {len(raw)} bytes; {len(kept)} from a path; {len(anew)} from memory")
    assert kept == raw and len(anew) < len(raw) / 2
EOF
