#!/usr/bin/env bash
# Classes that share one name bound clip-benchmark's zero-shot accuracy: a model without errors reaches 98.0% in Italian.
#
# Versions: clip-benchmark 1.6.2 (its accuracy() needs numpy below 2.4), torch 2.13.0. In each of its five languages of ImageNet,
# and in 55 of the 93 languages of Babel-ImageNet, two or more classes have one name (LANG_classnames.json,
# babel_imagenet.json). Their columns of the classifier are equal, argmax takes the first one, and all images of the others
# are wrong (mean_per_class_recall: 0 for these classes). The bound differs between languages, so a gap of two points to
# English is there before the model is. BR, FY and LA of Babel-ImageNet have class names but no templates
# (nllb_dist13b_prompts.json): KeyError. Report the bound, or group the classes of one name.
#
# Seen 2026-11-29: an oracle, which knows the name of the class of each image, with one image a class
#   ImageNet: en 0.998, cn 0.999, jp 0.991, it 0.980, ar 0.996
#   Babel-ImageNet: 55 of 93 languages below 1; lowest EL 0.984, ES 0.985, SA 0.985, SW 0.986; without templates BR, FY, LA
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 scikit-learn==1.9.1 tqdm==4.67.1
"$work/venv/bin/pip" install --quiet --no-deps clip-benchmark==1.6.2
CUDA_VISIBLE_DEVICES='' "$work/venv/bin/python" -W ignore - 2> "$work/log" <<'EOF' || { tail -20 "$work/log"; exit 1; }
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import torch
from clip_benchmark.metrics.zeroshot_classification import evaluate

folder = Path(importlib.util.find_spec("clip_benchmark").origin).parent / "datasets"


def table(name):
    return json.loads((folder / name).read_text(encoding="utf-8"))


class Images(list):
    """Batches of one image a class: the number of the name of its class."""

    def __init__(self, names, numbers):
        super().__init__([(torch.tensor([numbers[name] for name in names]), torch.arange(len(names)))])
        self.dataset = SimpleNamespace(classes=names)


def oracle(names):
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    features = torch.eye(len(numbers))
    model = SimpleNamespace(encode_text=lambda ids: features[ids], encode_image=lambda ids: features[ids])
    found = evaluate(model, Images(names, numbers), lambda texts: torch.tensor([numbers[text] for text in texts]), names,
                     ["{c}"], "cpu", amp=False)
    assert round(found["acc1"], 4) == round(found["mean_per_class_recall"], 4) == round(len(numbers) / len(names), 4)
    return found["acc1"]


imagenet = {lang: oracle(table(f"{lang}_classnames.json")["imagenet1k"]) for lang in ("en", "cn", "jp", "it", "ar")}
print("ImageNet:", ", ".join(f"{lang} {acc:.3f}" for lang, acc in imagenet.items()))
names, templates = table("babel_imagenet.json"), table("nllb_dist13b_prompts.json")
babel = {lang: oracle(classes) for lang, (_, classes) in names.items()}
below, lowest = sum(acc < 1 for acc in babel.values()), sorted(babel, key=babel.get)[:4]
without = sorted(names.keys() - templates.keys())
print(f"Babel-ImageNet: {below} of {len(babel)} languages below 1; lowest", end=" ")
print(", ".join(f"{lang} {babel[lang]:.3f}" for lang in lowest) + f"; without templates {', '.join(without)}")
assert round(imagenet["it"], 3) == 0.98 and max(imagenet.values()) < 1
assert (below, len(babel), without) == (55, 93, ["BR", "FY", "LA"])
EOF
