"""Retrieval of images by images of the same group: the mean average precision of a run's model.

    python benchmarks/groups.py runs/grouped --queries 'emoji-val/*.tar' --gallery 'emoji-train/*.tar' --by unified

Each image of the queries whose group is in the gallery ranks the gallery's images by cosine; those of its group are the
right ones. A group is a value of the JSON member. docs/products.md has the figures.
"""

from __future__ import annotations

import argparse
import glob
import io
import json
import tarfile
from pathlib import Path

import clipstream
from clipstream.evals.metrics import average_precision

import numpy as np  # isort: skip
import torch  # isort: skip
from PIL import Image  # isort: skip

LARGEST = 512  # images that are encoded at once


def samples(shards: str, by: str) -> tuple[list[Image.Image], list[str]]:
    """The images of shards and their groups; samples without a group are left out."""
    images: list[Image.Image] = []
    groups: list[str] = []
    for shard in sorted(glob.glob(shards)):
        with tarfile.open(shard) as tar:
            found: dict[str, dict[str, bytes]] = {}
            for member in tar:
                key, _, suffix = member.name.partition(".")
                content = tar.extractfile(member)
                found.setdefault(key, {})[suffix] = content.read() if content is not None else b""
        for parts in found.values():
            group = json.loads(parts["json"]).get(by)
            if group is not None:
                data = next(content for suffix, content in parts.items() if suffix in ("png", "jpg", "webp"))
                images.append(Image.open(io.BytesIO(data)))
                groups.append(group)
    return images, groups


def features(model: clipstream.Model, images: list[Image.Image]) -> torch.Tensor:
    """float32 [n, D], of length 1."""
    parts = [model.encode_image(images[i : i + LARGEST]) for i in range(0, len(images), LARGEST)]
    return torch.nn.functional.normalize(torch.cat([torch.as_tensor(part).float() for part in parts]), dim=1)


def main() -> None:
    """Print a row for each model: n, mAP, and the share of queries whose nearest image is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="runs or checkpoints")
    parser.add_argument("--queries", required=True)
    parser.add_argument("--gallery", required=True)
    parser.add_argument("--by", required=True, help="field of the JSON member")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    asked, wanted = samples(args.queries, args.by)
    shown, groups = samples(args.gallery, args.by)
    there = np.isin(wanted, groups)
    asked = [image for image, known in zip(asked, there, strict=True) if known]
    right = torch.as_tensor(np.asarray(wanted)[there][:, None] == np.asarray(groups)[None])
    for name in args.models:
        model = clipstream.load_model(name, device="cpu")[0]
        scores = features(model, asked) @ features(model, shown).T
        first = right[torch.arange(len(right)), scores.argmax(dim=1)].float().mean()
        found = average_precision(scores.T.double(), right.T).mean()
        print(f"{Path(name).name}: {len(right)} queries, {len(groups)} images, mAP {found:.4f}, R@1 {first:.4f}")


if __name__ == "__main__":
    main()
