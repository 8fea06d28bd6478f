#!/usr/bin/env bash
# nvImageCodec without a GPU: 0.8.0 decodes nothing and raises nothing; 0.9.0 decodes, if device and backend are both named.
#
# Versions: nvidia-nvimgcodec-cu12 0.8.0.22 and 0.9.0.20. Where it cannot decode, Python's Decoder.decode returns None and
# writes a warning to stderr. In 0.8.0 it returns None on a machine without a GPU, also with the backend CPU_ONLY and the
# device -99999 of the C header, which has a name in Python from 0.9.0 on. There it works together with the backend. So code
# for 0.8.0, the last version whose regions of JPEG files are not reported to fail on a GPU (NVIDIA/nvImageCodec#55), cannot
# be tested without one; and DALI 2.4.0 requires 0.9.
#
# Seen 2026-11-28: a region of 30 x 40 pixels is decoded in
#   0.8.0: by none of device, backend, both; 0.9.0: with both
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for version in 0.8.0.22 0.9.0.20; do
  python3 -m venv "$work/$version"
  "$work/$version/bin/pip" install --quiet "nvidia-nvimgcodec-cu12==$version" numpy==2.4.1 pillow==12.3.0
  CUDA_VISIBLE_DEVICES='' "$work/$version/bin/python" - 2> /dev/null <<'EOF'
import io

import numpy as np
from nvidia import nvimgcodec
from PIL import Image

file = io.BytesIO()
Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(file, "JPEG")
cpu, device = [nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)], -99999
ways = {"device": {"device_id": device}, "backend": {"backends": cpu}, "both": {"device_id": device, "backends": cpu}}
found = {}
for name, arguments in ways.items():
    try:
        region = nvimgcodec.CodeStream(file.getvalue()).get_sub_code_stream(region=nvimgcodec.Region(10, 20, 40, 60))
        image = nvimgcodec.Decoder(**arguments).decode(region)
        found[name] = None if image is None else tuple(image.shape)
    except Exception as error:
        found[name] = type(error).__name__
print(nvimgcodec.__version__, found)
assert found["both"] == (None if nvimgcodec.__version__ == "0.8.0" else (30, 40, 3))
EOF
done
