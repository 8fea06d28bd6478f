#!/usr/bin/env bash
# CLIPImageProcessor and torchvision's CenterCrop, as open_clip has it, cut images of odd margins a pixel apart.
#
# Versions: transformers 5.24.0, torchvision 0.29.2, torch 2.15.0. The offset of a crop is (227 - 224) / 2 = 1.5 pixels:
# transformers rounds it down, torchvision to the nearest even number. So at margins of 3, 7, 11, … the two crops begin a
# pixel apart, at 1, 5, 9, … they agree. A model that is fine-tuned with one library and served by the other sees a
# quarter of all images of random size shifted; only evaluation that is compared bit for bit shows it.
#
# Seen 2026-11-28: first column of the crop of a width, transformers and torchvision:
#   225: 0 0, 226: 1 1, 227: 1 2, 229: 2 2, 231: 3 4
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.15.0 torchvision==0.29.2 transformers==5.24.0 pillow==12.3.0
HF_HUB_OFFLINE=1 "$work/venv/bin/python" -W ignore - <<'EOF'
import numpy as np
from PIL import Image
from torchvision.transforms import CenterCrop
from transformers import CLIPImageProcessor

processor = CLIPImageProcessor(do_normalize=False, do_rescale=False)
found = {}
for width in (225, 226, 227, 229, 231):
    columns = np.broadcast_to(np.arange(width, dtype="uint8")[None, :, None], (224, width, 3)).copy()
    image = Image.fromarray(columns)  # each pixel has the number of its column; the short side is 224 already
    theirs = processor(images=image, return_tensors="np")["pixel_values"][0, 0, 0, 0]
    found[width] = int(theirs), int(np.asarray(CenterCrop(224)(image))[0, 0, 0])
print(", ".join(f"{width}: {one} {other}" for width, (one, other) in found.items()))
assert found == {225: (0, 0), 226: (1, 1), 227: (1, 2), 229: (2, 2), 231: (3, 4)}
EOF
