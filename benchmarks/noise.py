"""What a filter wins back: emoji with 30% of captions shuffled among images, and the best 70% by the model's own score.

    python benchmarks/noise.py DIR OUT [--steps 200]

DIR holds emoji-train/ and emoji-val/ (see configs/emoji.yaml). Trains on the captions as they are, on noisy ones, and
on the part of these that `clipstream filter` keeps by the noisy model's doubt, then by that of the model of this part;
runs that OUT has are not repeated.
Prints R@1 (mean of both ways, over the pairs of emoji-val) and the noise among the samples that are kept.

200 steps, seeds 0 to 2: R@1 of clean captions 11.0, 9.1, 8.6%, with noise 3.9, 3.7, 3.4%, filtered 7.2, 7.5, 6.6%
(47, 71, 62% of the loss won back), and by the model of these 7.0, 8.2, 7.9% (44, 83, 88%). Of 4,887 samples that are
kept 9.6, 9.1, 9.2% have another one's captions, and 8.5, 7.8, 8.2% the second time. By `clip_score` 10.6% of seed 0.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
from pyarrow import parquet

SHARE, KEPT = 0.3, 70  # of samples with another one's captions; of those that are kept, in percent
MODEL = {
    "embed_dim": 64,
    "vision_cfg": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 16, "head_width": 64},
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 128, "heads": 2, "layers": 2},
}


def shuffled(shards: list[Path], out: Path, seed: int) -> set[str]:
    """Write the shards with the captions of some samples moved; the names SHARD/KEY of these."""
    members = {path: read(path) for path in shards}
    names = [(path, name) for path, of in members.items() for name in of if name.endswith(".json")]
    draw = np.random.default_rng(seed)
    some = draw.permutation(len(names))[: round(SHARE * len(names))].tolist()
    texts = [json.loads(members[path][name])["caption"] for path, name in names]
    for number, other in zip(some, np.roll(some, 1).tolist(), strict=True):
        path, name = names[number]
        members[path][name] = json.dumps({**json.loads(members[path][name]), "caption": texts[other]}).encode()
    out.mkdir(parents=True, exist_ok=True)
    for path, of in members.items():
        with tarfile.open(out / path.name, "w") as tar:
            for name, content in of.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return {f"{names[number][0].name}/{names[number][1].removesuffix('.json')}" for number in some}


def read(path: Path) -> dict[str, bytes]:
    """The members of a tar by name."""
    with tarfile.open(path) as tar:
        return {entry.name: tar.extractfile(entry).read() for entry in tar}  # type: ignore[union-attr]


def run(*words: object) -> None:
    """Run a verb."""
    subprocess.run([sys.executable, "-m", "clipstream", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def train(out: Path, name: str, data: Path, options: argparse.Namespace, *flags: object) -> float:
    """R@1 of a run, in percent; it is trained unless it is there."""
    results = out / name / "metrics.jsonl"
    if not (results.is_file() and "R@1" in results.read_text(encoding="utf-8")):
        trains, tests = f"{data}/{{00000..00008}}.tar", f"{options.data}/emoji-val/{{00000..00004}}.tar"
        run("train", "--config", "benchmarks/emoji_adamw.yaml", "--model", out / "model.json",
            "--logs", out, "--name", name, "--train-data", trains, "--val-data", tests, "--steps", options.steps,
            "--evals.val.every", options.steps, *flags)  # fmt: skip
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    last = next(line for line in reversed(lines) if "image_to_text_R@1" in line)
    return 50 * (float(last["image_to_text_R@1"]) + float(last["text_to_image_R@1"]))


def main() -> None:
    """Train, filter, train again, and print a line for each seed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    clean = options.data / "emoji-train"
    for seed in options.seeds:
        out = (options.out / f"seed{seed}").absolute()
        moved = shuffled(sorted(clean.glob("*.tar")), out / "data", seed)
        (out / "model.json").write_text(json.dumps(MODEL))
        noisy, captions = f"{out}/data/{{00000..00008}}.tar", ("--caption-json", "caption.en;caption.alt")
        before = [train(out, name, data, options, "--seed", seed) for name, data in
                  (("clean", clean), ("noisy", out / "data"))]  # fmt: skip
        print(f"seed {seed}: R@1 {before[0]:.2f}% clean, {before[1]:.2f}% with noise", flush=True)
        model = "noisy"
        for name in ("filtered", "filtered-again"):  # by the noisy model, then by the model of what that one kept
            keep, store = out / f"{name}.parquet", out / f"store-{model}"
            if not store.exists():
                run("precompute", store, "--towers", "both", "--train-data", noisy, *captions, "--model", out / model)
            best = f"rank() OVER (ORDER BY doubt DESC) <= {KEPT / 100} * count(*) OVER ()"
            run("filter", noisy, "--where", best, "--scores", f"doubt={store}:doubt", "--out", keep, *captions)
            names = [f"{row['shard']}/{row['key']}" for row in parquet.read_table(keep).to_pylist()]
            after = train(out, name, out / "data", options, "--seed", seed, "--data.sources.train.keep", keep)
            noise = sum(name in moved for name in names) / len(names)
            won = (after - before[1]) / (before[0] - before[1])
            print(
                f"{name}: {after:.2f}% ({won:.0%} won back); {len(names):,} samples with {noise:.1%} of noise",
                flush=True,
            )
            model = name


if __name__ == "__main__":
    main()
