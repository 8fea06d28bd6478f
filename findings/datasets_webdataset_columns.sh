#!/usr/bin/env bash
# The webdataset loader of Hugging Face datasets decides the columns by the first five samples of the first shard.
#
# Version: datasets 5.2.0. A member that is missing in the first five samples is left out of all samples, without a
# warning; a shard in which later images are PNG instead of JPEG gives None for them; a JSON caption that is a list in a
# later sample, where the first ones have a string, becomes the list's Python text. A shard that clipstream, webdataset
# or open_clip read whole thus loses captions or images there.
#
# Seen 2026-11-28:
#   captions from the sixth sample on: columns ['__key__', '__url__', 'jpg'], 7 captions of 12 samples lost
#   PNG from the sixth sample on: 7 of 12 images are None
#   list captions from the sixth sample on: "['a', 'b']"
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet datasets==5.2.0 pillow==12.3.0
HF_HOME="$work/home" HF_HUB_OFFLINE=1 "$work/venv/bin/python" - "$work" <<'EOF'
import io
import json
import sys
import tarfile

import datasets
from PIL import Image

work = sys.argv[1]


def image(form):
    out = io.BytesIO()
    Image.new("RGB", (16, 16), "red").save(out, form)
    return out.getvalue()


def load(name, samples):
    with tarfile.open(f"{work}/{name}.tar", "w") as tar:
        for number, members in enumerate(samples):
            for suffix, data in members.items():
                info = tarfile.TarInfo(f"{number:04}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return datasets.load_dataset("webdataset", data_files={"train": f"{work}/{name}.tar"}, split="train")


jpg, png = image("JPEG"), image("PNG")
late = load("late", [{"jpg": jpg} | ({"txt": b"a caption"} if n >= 5 else {}) for n in range(12)])
print("captions from the sixth sample on:", sorted(late.features), len(late))
mixed = load("mixed", [{"jpg" if n < 5 else "png": jpg if n < 5 else png, "txt": b"a caption"} for n in range(12)])
lost = sum(sample["jpg"] is None for sample in mixed)
print("PNG from the sixth sample on:", sorted(mixed.features), lost, "of", len(mixed), "images are None")
captions = [{"jpg": jpg, "json": json.dumps({"caption": "a" if n < 5 else ["a", "b"]}).encode()} for n in range(12)]
listed = load("listed", captions)
print("list captions from the sixth sample on:", repr(listed[11]["json"]["caption"]))
assert sorted(late.features) == ["__key__", "__url__", "jpg"] and len(late) == 12
assert sorted(mixed.features) == ["__key__", "__url__", "jpg", "txt"] and lost == 7
assert listed[11]["json"]["caption"] == "['a', 'b']"
EOF
