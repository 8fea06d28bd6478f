"""Training seconds until a level of R@1 on held-out pairs, of recipes and of open_clip's trainer on the same shards.

    python benchmarks/time_to_accuracy.py emoji DIR OUT                          # the recipes of this file
    python benchmarks/time_to_accuracy.py emoji DIR OUT --recipes adamw emoji --seeds 0 1 2 3 4
    python benchmarks/time_to_accuracy.py emoji DIR OUT --recipe 'short: configs/emoji.yaml --steps 80'

DIR holds emoji-train/ and emoji-val/ (see configs/emoji.yaml), or icons-train/ and icons-val/. A recipe is
`NAME: CONFIG FLAGS` of `clipstream train`, or `NAME: open_clip FLAGS` of open_clip_train, which needs `make peers`.
`--before 'NAME: COMMAND'` is work that the recipe needs first, with {seed} and {out} in it; it is timed too.

Recipes take turns within each seed, and a run that OUT has is not repeated. R@1 is the mean of both directions over all
pairs of the validation shards, found every `--every` steps outside of the clock (see `clock.py`); a run ends where it
reaches the level. Wall and CPU seconds are those from before the first batch to the last step, the workers' included.
A run that does not reach the level is said, and has no part in the mean.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from input import Work, write_captioned

ROOT = Path(__file__).parent.parent
PEERS = ROOT / "build" / "peers"
SAME = (
    "--model small --batch-size 256 --beta1 0.9 --beta2 0.98 --eps 1e-6 --wd 0.1 --grad-clip-norm 1 --warmup 20 "
    "--workers 1"
)


@dataclass(frozen=True)
class DataSet:
    """Where a folder has its shards, the caption in their JSON, a level, and recipes by name."""

    train: str
    val: str
    caption: str | None
    level: float
    recipes: dict[str, str]


STAGES = "--optim.lr 9e-3 --stages.small '{until: %d, set: {model.image_size: 32, optim.lr: 3e-3}}'"
VIT = "--model.name benchmarks/vit256.json"
GROUPS = (  # needs an index: `clipstream index DIR/icons-train`
    "--data.sampling.mode indexed --data.groups.by json:group --data.groups.samples 2 --loss.positives.by json:group "
    "--loss.image_image 2"
)
SETS = {
    "emoji": DataSet(
        "emoji-train/*.tar",
        "emoji-val/*.tar",
        "caption.en",
        0.10,
        {
            "adamw": "benchmarks/emoji_adamw.yaml",
            "emoji": "configs/emoji.yaml",
            "open_clip": f"open_clip --lr 2e-3 --steps 300 --aug-cfg 'scale=(0.6,1.0)' {SAME}",
            "open_clip-short": f"open_clip --lr 2e-3 --steps 150 --aug-cfg 'scale=(0.8,1.0)' {SAME}",
            "vit": f"configs/emoji.yaml --steps 150 {VIT}",
            "vit-stages": f"configs/emoji.yaml --steps 150 {VIT} {STAGES % 105}",
        },
    ),
    "icons": DataSet(
        "icons-train/*.tar",
        "icons-val/*.tar",
        None,
        0.103,  # of AdamW after 10 minutes, mean of seeds 0 to 2
        {
            "adamw": "benchmarks/emoji_adamw.yaml --caption-key txt --steps 1900",
            "small-data": "configs/recipes/small-data.yaml --steps 700 --optim.lr 6e-3",
            "groups": f"configs/recipes/small-data.yaml --steps 300 --optim.lr 6e-3 {GROUPS}",
            "vit": f"configs/recipes/small-data.yaml --steps 300 --optim.lr 3e-3 {VIT}",
            "vit-stages": f"configs/recipes/small-data.yaml --steps 300 {VIT} {STAGES % 210}",
        },
    ),
}


@dataclass(frozen=True)
class Recipe:
    name: str
    config: str
    flags: list[str]

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """Of `NAME: CONFIG FLAGS`."""
        name, _, words = text.partition(":")
        config, *flags = shlex.split(words)
        return cls(name.strip(), config, flags)


@dataclass(frozen=True)
class Row:
    step: int
    samples: int
    wall: float
    cpu: float
    recall: float  # mean of both directions


def read(path: Path) -> list[Row]:
    """The rows of a run."""
    with path.open(newline="") as file:
        return [
            Row(int(step), int(samples), float(wall), float(cpu), (float(one) + float(other)) / 2)
            for step, samples, wall, cpu, one, other in list(csv.reader(file))[1:]
        ]


class Bench:
    """The runs of one data set in a folder."""

    def __init__(self, data: DataSet, options: argparse.Namespace) -> None:
        self.data, self.options, self.out = data, options, options.out.absolute()
        self.train, self.val = (sorted(map(str, options.data.absolute().glob(p))) for p in (data.train, data.val))
        if not self.train or not self.val:
            sys.exit(f"{options.data} has no {data.train} or no {data.val}")
        self.out.mkdir(parents=True, exist_ok=True)
        self.env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/benchmarks", "CUDA_VISIBLE_DEVICES": ""}

    def path(self, recipe: Recipe, seed: int) -> Path:
        return Path(self.out / f"{recipe.name}-{seed}.csv")

    def run(self, recipe: Recipe, seed: int) -> None:
        """One run; its rows are in `path`."""
        part = self.path(recipe, seed).with_suffix(".part")
        words, env = (self.peer if recipe.config == "open_clip" else self.own)(recipe, seed, part)
        log = self.path(recipe, seed).with_suffix(".log")
        with log.open("w") as file:
            code = subprocess.run(words, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT).returncode
        rows = read(part) if part.is_file() else []
        if not rows or (code and rows[-1].recall < self.options.level):
            sys.exit(f"{recipe.name}, seed {seed}, ended with {code}: see {log}")
        part.rename(self.path(recipe, seed))

    def own(self, recipe: Recipe, seed: int, out: Path) -> tuple[list[str], dict[str, str]]:
        """The command of a run of clipstream."""
        clock = {
            "type": "clock:Clock",
            "every": self.options.every,
            "out": out,
            "level": self.options.level,
            "on-error": "raise",
            "data.shards": "::".join(self.val),
        }
        words = [f"--evals.clock.{key}={value}" for key, value in clock.items()]
        name = f"{recipe.name}-{seed}-{int(time.time())}"
        words += ["--train-data", "::".join(self.train), "--seed", str(seed), "--precision", self.options.precision]
        words += ["--logs", str(self.out / "runs"), "--name", name, *recipe.flags]
        return [sys.executable, "-m", "clipstream", "train", "--config", recipe.config, *words], self.env

    def peer(self, recipe: Recipe, seed: int, out: Path) -> tuple[list[str], dict[str, str]]:
        """The command of a run of open_clip_train."""
        if not PEERS.is_dir():
            sys.exit("open_clip_train needs a webdataset of its own: make peers")
        shards = self.train
        if self.data.caption is not None:
            folder = self.out / "captioned"
            shards = sorted(map(str, folder.glob("*.tar")))
            if len(shards) != len(self.train):
                shards = write_captioned(Work("train", self.train, 0, self.data.caption), folder)
        parser = argparse.ArgumentParser()
        parser.add_argument("--steps", type=int, required=True)
        parser.add_argument("--batch-size", type=int, required=True)
        known, rest = parser.parse_known_args(recipe.flags)
        words = ["--dataset-type", "webdataset", "--dataset-resampled", "--train-data", "::".join(shards)]
        words += ["--train-num-samples", str(known.steps * known.batch_size), "--batch-size", str(known.batch_size)]
        words += ["--epochs", "1", "--seed", str(seed), "--precision", self.options.precision, "--device", "cpu"]
        words += ["--logs", str(self.out / "runs"), "--name", f"{recipe.name}-{seed}-{int(time.time())}", *rest]
        arguments = [str(out), str(self.options.every), str(self.options.level), "::".join(self.val), *words]
        env = {**self.env, "PYTHONPATH": f"{PEERS}:{self.env['PYTHONPATH']}"}
        return [sys.executable, str(ROOT / "benchmarks" / "clock.py"), *arguments], env

    def prepare(self, recipe: Recipe, seed: int, command: str) -> None:
        """Run the work that a recipe needs first; its seconds are in NAME-SEED.before."""
        path = self.path(recipe, seed).with_suffix(".before")
        if path.is_file():
            return
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        text = command.format(seed=seed, out=self.out)
        subprocess.run(text, shell=True, check=True, cwd=ROOT, env=self.env, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        path.write_text(f"{time.perf_counter() - began:.3f} {cpu:.3f}\n")

    def cost(self, recipe: Recipe, seed: int) -> tuple[float, float]:
        """Wall and CPU seconds of that work; 0 for none."""
        path = self.path(recipe, seed).with_suffix(".before")
        wall, cpu = path.read_text().split() if path.is_file() else ("0", "0")
        return float(wall), float(cpu)

    def table(self, recipes: Sequence[Recipe]) -> None:
        """Print, for each recipe, what it took to the level: mean over seeds, spread, and the ratio to the first."""
        level, base = self.options.level, dict[str, float]()
        print(f"R@1 {level:.3g}, held out; seconds: mean (least to most)")
        print(
            f"{'recipe':<22}{'reached':>8}{'steps':>7}{'wall s':>22}{'ratio':>7}{'CPU s':>22}{'ratio':>7}{'before':>8}"
        )
        for recipe in recipes:
            runs = [(seed, read(self.path(recipe, seed))) for seed in self.options.seeds]
            first = [(seed, next((row for row in rows if row.recall >= level), None)) for seed, rows in runs]
            hits = [(seed, row) for seed, row in first if row is not None]
            line = f"{recipe.name:<22}{f'{len(hits)}/{len(runs)}':>8}"
            if hits:
                costs = [self.cost(recipe, seed) for seed, _ in hits]
                line += f"{statistics.mean(row.step for _, row in hits):>7.0f}"
                walls = [row.wall + cost[0] for (_, row), cost in zip(hits, costs, strict=True)]
                cpus = [row.cpu + cost[1] for (_, row), cost in zip(hits, costs, strict=True)]
                for kind, values in (("wall", walls), ("cpu", cpus)):
                    mean = statistics.mean(values)
                    spread = f"{mean:.1f} ({min(values):.0f} to {max(values):.0f})"
                    line += f"{spread:>22}{mean / base.setdefault(kind, mean):>7.2f}"
                line += f"{statistics.mean(cost[0] for cost in costs):>8.1f}"
            print(line, flush=True)

    def write(self, recipes: Sequence[Recipe], path: Path) -> None:
        """All rows of all runs as one table."""
        with path.open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(
                ("recipe", "seed", "step", "samples", "wall_s", "cpu_s", "before_wall_s", "before_cpu_s", "R@1")
            )
            for recipe in recipes:
                for seed in self.options.seeds:
                    for row in read(self.path(recipe, seed)):
                        cost = self.cost(recipe, seed)
                        table.writerow((recipe.name, seed, row.step, row.samples, row.wall, row.cpu, *cost, row.recall))

    def plot(self, recipes: Sequence[Recipe], path: Path) -> None:
        """R@1 over training seconds: the mean of the seeds, with a band from the least to the most."""
        import matplotlib
        import numpy as np

        matplotlib.use("Agg")
        from matplotlib import pyplot

        grey = "#7d8590"
        pyplot.rcParams.update({"text.color": grey, "axes.edgecolor": grey, "svg.hashsalt": "accuracy"})
        figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
        for recipe in recipes:
            runs = [read(self.path(recipe, seed)) for seed in self.options.seeds]
            # a run ends at the level: seconds are averaged at equal R@1, of which all have the most until then
            heights = np.linspace(0, min(max(row.recall for row in rows) for rows in runs), 60)
            best = [np.maximum.accumulate([row.recall for row in rows]) for rows in runs]
            walls = [
                np.interp(heights, [0, *top], [0, *(row.wall for row in rows)])
                for top, rows in zip(best, runs, strict=True)
            ]
            (line,) = axes.plot(np.mean(walls, axis=0), 100 * heights, label=recipe.name)
            axes.fill_betweenx(
                100 * heights, np.min(walls, axis=0), np.max(walls, axis=0), alpha=0.2, color=line.get_color()
            )
        axes.axhline(100 * self.options.level, color=grey, dashes=(4, 3))
        axes.set(xlabel="training seconds", ylabel="R@1, %", xlim=(0, None), ylim=(0, None))
        axes.tick_params(labelcolor=grey)
        axes.xaxis.label.set_color(grey)
        axes.yaxis.label.set_color(grey)
        axes.legend(fontsize="small")
        figure.savefig(path, transparent=True, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Run what OUT lacks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=SETS)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipes", nargs="*", default=None, help="names of recipes of this file; all by default")
    parser.add_argument("--recipe", action="append", default=[], metavar="NAME: CONFIG FLAGS")
    parser.add_argument("--before", action="append", default=[], metavar="NAME: COMMAND")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--level", type=float, default=None, help="of R@1; by default that of the data set")
    parser.add_argument(
        "--every", type=int, default=10, help="steps between evaluations; divides the steps of each run"
    )
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--csv", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None, help="SVG or PNG; needs matplotlib")
    options = parser.parse_args()
    data = SETS[options.set]
    options.level = data.level if options.level is None else options.level
    names = options.recipes if options.recipes is not None else [] if options.recipe else list(data.recipes)
    recipes = [Recipe.parse(f"{name}: {data.recipes[name]}") for name in names]
    recipes += [Recipe.parse(text) for text in options.recipe]
    before = {name.strip(): command for name, _, command in (text.partition(":") for text in options.before)}
    bench = Bench(data, options)
    for number, seed in enumerate(options.seeds):
        for recipe in recipes if number % 2 == 0 else reversed(recipes):
            if not bench.path(recipe, seed).is_file():
                if recipe.name in before:
                    bench.prepare(recipe, seed, before[recipe.name])
                bench.run(recipe, seed)
                last = read(bench.path(recipe, seed))[-1]
                print(
                    f"{recipe.name}, seed {seed}: {last.recall:.2%} at step {last.step}, {last.wall:.1f} s", flush=True
                )
    bench.table(recipes)
    if options.csv is not None:
        bench.write(recipes, options.csv)
    if options.plot is not None:
        bench.plot(recipes, options.plot)


if __name__ == "__main__":
    main()
