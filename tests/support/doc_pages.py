"""Pages of the documentation as sessions: their code blocks, and how each is run in a folder of small generated data.

A block is fenced with its language, or indented (a shell command). It runs unless an HTML comment before it says why
not: `<!-- not run: needs 8 GPUs -->`. Flags of a command that is not run are checked all the same.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from clipstream.cli.main import VERBS, main
from clipstream.config.settings import read
from clipstream.config.validate import validate_run
from clipstream.distributed.world import World
from tests.support import model_files
from tests.support.clipbenchmark import drawn, write_benchmark
from tests.support.evaluating import CONFIG
from tests.support.forks import ROOT
from tests.support.pictures import make_shards, picture
from tests.support.ranks import TIMEOUT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
OUTPUT = {"text", "json", "mermaid"}  # languages of what is shown and not typed
BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+?) -->\n\n?)?"
    r"(?:^(?P<indent> *)```(?P<language>[^\n]*)\n(?P<fenced>.*?)^ *```$"
    r"|(?<=\n\n)(?P<indented>(?:    [^\n]*\n|\n(?=    ))+))",
    re.M | re.S,
)

# Sizes in place of those of a real run, and models in place of those that are not here.
SIZES = {
    "--steps": "3", "--epochs": "1", "--warmup": "1", "--batch-size": "8", "--workers": "1",
    "--train-num-samples": "16", "--seconds": "0.1", "--counts": "1",
    "--data.global-batch-size": "8", "--precision": "fp32", "--accum-freq": "1", "--train.micro-batch-size": "8",
    "--executor": "local:1", "--checkpoint.every": "1", "--val-frequency": "1", "--lr": "1e-4",
}  # fmt: skip
MODELS = {
    "ViT-B-32": "model.json",
    "ViT-B-16-SigLIP": "siglip.json",
    "openai": "local-dir:model",
    "webli": "local-dir:siglip",
    "ViT-L-14": "local-dir:model",
    "large=ViT-L-14,openai": "large=local-dir:model",
}
EXTRAS = {"onnx": "onnxruntime", "sentence-transformers": "sentence_transformers"}  # word -> package
ALIKE = {"--steps": "length", "--epochs": "length", "--train.samples": "length", "--batch-size": "batch"}
ALIKE |= {"--data.global-batch-size": "batch", "--train.precision": "--precision"}


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    reason: str | None  # why it is not run

    @property
    def file(self) -> str | None:
        """The file that the block is the content of, named by its first line: `# my_loss.py`."""
        match = re.match(r"# ([\w./-]+\.(?:py|yaml|sh))\n", self.text)
        return match[1] if match else None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        body = match["fenced"] if match["indented"] is None else match["indented"].rstrip("\n") + "\n"
        indent = match["indent"] if match["indented"] is None else "    "
        language = "bash" if match["indented"] is not None else re.split(r"[\s{]", match["language"].strip(" {."))[0]
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(path.name, line, language, re.sub(f"^{indent}", "", body, flags=re.M), match["reason"]))
    return found


def commands(block: Block) -> Iterator[str]:
    """The commands of a shell block, each on one line, without comments."""
    for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
        command = re.sub(r"(?:^|\s+)#\s.*$", "", line).strip()
        if command:
            yield command


def verb_of(words: list[str]) -> tuple[str, list[str], int] | None:
    """(verb, its flags, ranks) of a command of clipstream's, also one that torchrun starts; None for another."""
    if words[:1] == ["clipstream"] and words[1:2] and words[1] in VERBS:
        return words[1], words[2:], 1
    for at, word in enumerate(words):
        if word.startswith("clipstream.") and words[at - 1] == "-m":
            ranks = words[words.index("--nproc-per-node") + 1] if "--nproc-per-node" in words[:at] else "1"
            return word.removeprefix("clipstream."), words[at + 1 :], int(ranks) if ranks.isdigit() else 1
    return None


def small(verb: str, flags: list[str]) -> list[str]:
    """The flags with small sizes and models, and few shards."""
    found = [MODELS.get(word, word).replace("00099}", "00001}") for word in flags]
    for at, word in enumerate(found[:-1]):
        found[at + 1] = SIZES.get(word, found[at + 1])
    if "--distill-pretrained" in found:
        at = found.index("--distill-pretrained")
        del found[at : at + 2]
    files = [Path(file) for word, file in itertools.pairwise(found) if word == "--config"]
    if any(file.parts[0] == "runs" for file in files):  # repeats a run, whose settings are small
        return found
    written = "".join(file.read_text(encoding="utf-8") for file in files)
    more: dict[str, str] = {}
    if verb == "train":
        more = {flag: SIZES[flag] for flag in ("--warmup", "--workers", "--precision", "--data.global-batch-size")}
        more |= {"--epochs": "1"} if re.search(r"\bepochs:", written) else {"--steps": "3"}
        more |= {"--model": "model.json"} if "model:" not in written else {}
        more |= {"--device": "cpu", "--log.every": "1", "--log.tensorboard": "false", "--run.threads": "1"}
    elif verb == "precompute":
        more = {"--workers": "1", "--batch-size": "8"}
    elif verb == "evaluate":
        more = {"--device": "cpu"}
    given = {ALIKE.get(word, word) for word in found}
    return [
        *found,
        *(word for flag, value in more.items() if ALIKE.get(flag, flag) not in given for word in (flag, value)),
    ]


@dataclass
class Session:
    """A page's blocks, run one after the other in the current folder."""

    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "docs"})  # of its Python code
    rename: dict[str, str] = field(default_factory=dict)  # words of commands -> those of small runs
    ran: list[str] = field(default_factory=list)  # commands

    def run(self, block: Block) -> None:
        """Run a block, write the file that it is, or check the flags of one that is not run."""
        if block.language in OUTPUT:
            return
        if block.file is not None:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text, encoding="utf-8")
        if block.language == "yaml" and block.reason is None:
            self.check_settings(block)
        elif block.language == "python" and block.reason is None and block.file is None:
            code = compile("\n" * block.line + block.text, block.page, "exec")
            exec(code, self.names)
        elif block.language == "bash" and block.file is None:
            for command in commands(block):
                self.command(block, command)

    def check_settings(self, block: Block) -> None:
        """A YAML block is a file of settings that, with data and a length where it has none, are right."""
        path = Path(block.file or f"block-{block.line}.yaml")
        path.write_text(block.text, encoding="utf-8")
        more = [] if "sources:" in block.text else ["--train-data", "shards/00000.tar"]
        steps = [] if re.search(r"^train:", block.text, re.M) else ["--steps", "9"]
        validate_run(read(["--config", str(path), "--warmup", "0", *steps, *more]), World())
        text = block.text.replace("00099}", "00001}")
        path.write_text(re.sub("|".join(map(re.escape, MODELS)), lambda name: MODELS[name[0]], text))

    def command(self, block: Block, command: str) -> None:
        """Run a command, in this process if it is clipstream's."""
        for word, other in self.rename.items():
            command = command.replace(word, other)
        command, _, into = command.partition(" > ")
        words = shlex.split(command)
        found = verb_of(words)
        if block.reason is not None:
            if found is not None and found[0] == "train" and words[0] != "srun" and not {"$", "…"} & set(command):
                written = read([flag for flag in small("train", found[1]) if flag], ranks=found[2])
                validate_run(written, World(size=found[2]))
            return
        self.ran.append(command)
        if found is None:
            assert words[0] not in ("make", "pip", "torchrun", "srun"), f"{block}: {command}"
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=TIMEOUT, check=False)
            assert done.returncode == 0, f"{block}: {command}: {done.stderr}"
            return
        verb, flags, _ = found
        if any(word in flags and find_spec(package) is None for word, package in EXTRAS.items()):
            return
        out = io.StringIO()
        with contextlib.redirect_stdout(out) if into else contextlib.nullcontext():
            code = main([verb, *small(verb, flags)])
        assert code == 0, f"{block}: {command}"
        if into:
            Path(into.strip()).write_text(out.getvalue(), encoding="utf-8")


def make_folder(home: Path) -> Path:
    """What a reader of the pages has: shards under their names, a table, class names, small models."""
    made = make_shards(home / "made", [6, 5], alt="a longer text about the picture")
    folders = (("shards", 100, 5), ("val", 4, 2), ("known", 4, 2), ("other", 2, 1), ("animals", 2, 1))
    for where, count, digits in folders:
        (home / where).mkdir()
        for number in range(count):
            (home / where / f"{number:0{digits}d}.tar").symlink_to(made[number % 2])
    (home / "web").symlink_to("shards")
    (home / "animals.txt").write_text("cat\ndog\neel\n")
    (home / "pictures").mkdir()
    rows = ["path,title"]
    for number in range(12):
        (home / "pictures" / f"{number}.jpg").write_bytes(picture(number))
        rows.append(f"pictures/{number}.jpg,picture {number}")
    (home / "pairs.csv").write_text("\n".join(rows) + "\n")
    products = [f"pictures/{n}.jpg,a thing,{('cup', 'hat')[n % 2]}" for n in range(12)]
    (home / "products.csv").write_text("\n".join(["file,title,category", *products]) + "\n")
    for number in range(24):
        pair = home / "photos" / f"{number % 3}" / f"{number}.jpg"
        pair.parent.mkdir(parents=True, exist_ok=True)
        pair.write_bytes(picture(number))
        pair.with_suffix(".txt").write_text(f"a photo of {number}\nfr.utf8=une photo de {number}\n")
    for number in range(12):
        bird = home / "birds" / ("red_kite", "owl")[number % 2] / f"{number:03d}.jpg"
        bird.parent.mkdir(parents=True, exist_ok=True)
        bird.write_bytes(picture(number))
    (home / "cat.jpg").write_bytes(picture(0))
    for split in ("test", "train"):
        write_benchmark(home / "sets/cars", drawn(3), split=split)
    (home / "configs").symlink_to(ROOT / "configs")
    text = {**CONFIG["text_cfg"], "vocab_size": 49408}  # type: ignore[dict-item]
    (home / "model.json").write_text(json.dumps({**CONFIG, "text_cfg": text}))
    (home / "siglip.json").write_text(json.dumps({**CONFIG, "text_cfg": text, "init_logit_bias": -10}))
    for name in ("model", "siglip"):
        model_files.build(str(home / f"{name}.json")).save_pretrained(home / name)
    (home / "my.yaml").write_text(
        "data: {sources: {train: {shards: 'shards/{00000..00099}.tar'}}}\n"
        "train: {steps: 5}\nmodel: {name: model.json}\n"
    )
    return home
