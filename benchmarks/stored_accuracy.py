"""What stored types of features cost in accuracy: retrieval and zero-shot classification from the rows of stores.

    for type in float32 float16 bfloat16 int8; do
      clipstream precompute OUT/$type --towers both --dtype $type --model local-dir:CHECKPOINT \\
        --precision fp32 --train-data 'DIR/emoji-val/{00000..00004}.tar'
    done
    python benchmarks/stored_accuracy.py OUT/float32 OUT/float16 OUT/bfloat16 OUT/int8 \\
      --labels 'DIR/emoji-val/{00000..00004}.tar' --classes CLASSES

The stores have the same samples, with features of pictures and of captions; changes, in points, are those against the
first. The labels are the members `cls` of the shards; the classifier is that of the evaluator `zero_shot`, in float32,
of the model in the first store. Rows are used as search uses them: decoded, then scaled to length 1.

Emoji of a third vendor (1,852 pairs, 9 classes, 128 features; one is 0.05 points), 300 steps of emoji_adamw.yaml:
R@1 14.5% and 16.1%, top-1 12.2% from float32; float16 changes nothing, bfloat16 -0.05 points of R@1
image to text, int8 -0.11 points of it and +0.11 of top-1. A model of 150 steps (6.6%, 7.9%, 18.0%): float16 nothing,
bfloat16 +0.05 points of R@1 text to image, int8 -0.11 points of top-1. configs/lit.yaml's model with 1,280 features
(5.2%, 3.7%, 41.3%): int8 -0.11 and +0.11 points of R@1, +0.05 of top-1.
"""

from __future__ import annotations

import argparse
import tarfile
from pathlib import Path

import numpy as np
import torch

from clipstream.data.decode.class_names import class_names, prompt_templates
from clipstream.data.decode.tokenizers import build_tokenizer
from clipstream.data.settings import ModelTokenizer
from clipstream.data.sources import expand
from clipstream.distributed.world import World
from clipstream.evals.context import EvalContext
from clipstream.evals.retrieval_and_loss import recalls
from clipstream.evals.zero_shot import score, text_classifiers
from clipstream.features.manifest import IMAGE, MODEL, TEXT
from clipstream.features.store import FeatureStore
from clipstream.features.stored_rows import StoredRows
from clipstream.models.build import build_towers
from clipstream.models.settings import ModelSettings

METRICS = ("image_to_text_R@1", "text_to_image_R@1", "zero_shot_top1")
TEMPLATES = ("{c}", "an emoji of {c}")


def labels_of(shards: list[str]) -> dict[str, int]:
    """'SHARD/KEY' -> the number in its member `cls`."""
    found = {}
    for shard in shards:
        with tarfile.open(shard) as tar:
            for member in tar:
                if member.name.endswith(".cls") and (data := tar.extractfile(member)) is not None:
                    found[f"{Path(shard).name}/{member.name.removesuffix('.cls')}"] = int(data.read())
    return found


@torch.inference_mode()
def classifier_of(store: FeatureStore, classes: list[str], templates: list[str]) -> torch.Tensor:
    """The classifier of C classes by the store's model, float32 [C, D]."""
    towers = build_towers(ModelSettings(name=f"local-dir:{Path(store.path) / MODEL}"), seed=0).eval()
    tokenizer = build_tokenizer(ModelTokenizer(), towers.open_clip_tokenizer(), towers.context_length)
    return text_classifiers(EvalContext(towers, tokenizer, World()), [(classes, prompt_templates(templates))])[0]


def measure(store: FeatureStore, labels: dict[str, int], classifier: torch.Tensor | None) -> dict[str, float]:
    """METRICS, those that there is a classifier for."""
    pictures, captions = StoredRows(store, IMAGE), StoredRows(store, TEXT)
    images, texts = (torch.cat([block for _, block in rows.blocks()]) for rows in (pictures, captions))
    counts = np.concatenate([shard.rows_of_samples() for shard in captions.shards])
    owners = torch.arange(len(images)).repeat_interleave(torch.from_numpy(counts[counts > 0]))
    found = dict(recalls(images, texts, World(), owners=owners))
    if classifier is not None:
        names = [name.label for number in range(len(pictures.shards)) for name in pictures.names_of(number)]
        hits = score(images, classifier, torch.tensor([labels[name] for name in names]))
        found["zero_shot_top1"] = float(hits[:, 0].mean())
    return {name: found[name] for name in METRICS if name in found}


def main() -> None:
    """Print a row for each store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stores", nargs="+", help="the first is what the others are compared with")
    parser.add_argument("--labels", help="shards with members cls; without them retrieval alone is measured")
    parser.add_argument("--classes", default="imagenet", help="a file with a name a line, or imagenet")
    parser.add_argument("--templates", nargs="+", default=TEMPLATES, help="prompts, with {c} for the class name")
    args = parser.parse_args()
    torch.set_num_threads(1)
    stores = [FeatureStore(path) for path in args.stores]
    labels, classifier = {}, None
    if args.labels:
        labels = labels_of(expand(args.labels))
        classifier = classifier_of(stores[0], class_names(args.classes), list(args.templates))
    first: dict[str, float] = {}
    for store in stores:
        found = measure(store, labels, classifier)
        if not first:
            first = found
            print(f"{'store':<24}{'type':<10}" + "".join(f"{name:>26}" for name in found))
        cells = (f"{value:.3%} ({100 * (value - first[name]):+.3f})" for name, value in found.items())
        dtype = store.manifest.parts[IMAGE].dtype
        print(f"{Path(store.path).name:<24}{dtype:<10}" + "".join(f"{cell:>26}" for cell in cells))


if __name__ == "__main__":
    main()
