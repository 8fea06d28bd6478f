"""README's commands run as they are written, in a folder like its reader's, with a small model."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import open_clip
import pytest

from clipstream import check, compare, evaluate, index, stage, train
from clipstream.config.settings import load
from clipstream.config.validate import validate_run
from clipstream.distributed.world import World
from clipstream.tools.stage import OWN_FLAGS
from tests.support.clipbenchmark import drawn, write_benchmark
from tests.support.evaluating import CONFIG
from tests.support.pictures import make_shards
from tests.support.ranks import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
MAINS: dict[str, Callable[[list[str]], int]] = {
    "check": check.main,
    "compare": compare.main,
    "evaluate": evaluate.main,
    "index": index.main,
    "stage": stage.main,
    "train": train.main,
}
SMALL = "--model model.json --steps 2 --warmup 1 --batch-size 8 --workers 1 --log.every 1 --name NAME"


def commands() -> list[list[str]]:
    """The indented command lines that run clipstream, in README's order, as words."""
    lines = re.findall(r"^    ((?:\S+ )*-m clipstream\.\w+(?:.*\\\n)*.*)$", README.replace("\\\n        ", ""), re.M)
    return [shlex.split(line.partition("  #")[0]) for line in lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What README's reader has: shards under its names, and class names."""
    home = tmp_path_factory.mktemp("reader")
    made = make_shards(home / "made", [6, 5])
    for where, count, digits in (("shards", 100, 5), ("val", 4, 2), ("other", 2, 1), ("animals", 2, 1)):
        (home / where).mkdir()
        for number in range(count):
            (home / where / f"{number:0{digits}d}.tar").symlink_to(made[number % 2])
    (home / "web").symlink_to("shards")
    (home / "animals.txt").write_text("cat\ndog\neel\n")
    for split in ("test", "train"):
        write_benchmark(home / "sets/cars", drawn(3), split=split)
    text = {**CONFIG["text_cfg"], "vocab_size": 49408}  # type: ignore[dict-item]
    (home / "my.yaml").write_text(
        "data: {sources: {train: {shards: 'shards/{00000..00099}.tar'}}}\ntrain: {steps: 5}\nmodel: {name: model.json}"
    )
    (home / "model.json").write_text(json.dumps({**CONFIG, "text_cfg": text}))
    return home


def test_the_commands_of_the_first_day_run_in_their_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    runs = [words for words in commands() if words[0] == "python" and not {"my.yaml", "--suite"} & set(words)]
    assert [words[2].rpartition(".")[2] for words in runs] == [
        "check",
        "train",
        "train",
        "index",
        "compare",
        "evaluate",
        "evaluate",
    ]
    first = True
    for words in runs:
        verb, flags = words[2].rpartition(".")[2], words[3:]
        if verb == "compare":
            Path("runs/ONE").symlink_to("NAME")
            Path("runs/OTHER").symlink_to("again")
        if verb == "train" and first:
            flags, first = [*flags, *SMALL.split()], False
        assert MAINS[verb](flags) == 0, words
    texts = [Path(f"runs/{run}/metrics.jsonl").read_text() for run in ("NAME", "again")]
    ends = [[json.loads(line) for line in text.splitlines()] for text in texts]
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in ends]
    assert len(losses[0]) == 2 and losses[0] == losses[1]  # the settings alone repeat the run
    Path("runs/NAME/checkpoints/step_00001000").symlink_to("step_00000002")
    code = re.findall(r"```python\n(model, _, preprocess = .*?)```", README, re.DOTALL)
    exec(code[0], {"open_clip": open_clip})


def test_commands_of_many_ranks_are_right(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    torchruns = [words for words in commands() if words[0] == "torchrun"]  # Slurm's scripts are run elsewhere
    assert len(torchruns) == 2
    for words in torchruns:
        ranks = int(words[words.index("--nproc-per-node") + 1])
        flags = words[words.index("clipstream.train") + 1 :]
        validate_run(load(flags, ranks=ranks), World(size=ranks))


def test_commands_of_copied_shards_are_right(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    copy, training = (words for words in commands() if words[0] == "python" and {"--config", "my.yaml"} <= {*words})
    assert MAINS["stage"](copy[3:]) == 0
    settings = load(training[3:])
    validate_run(settings, World())
    assert settings.data.sources["train"].shards == [f"{folder}/fast/mine/sources/train/{{00000..00099}}.tar"]


def test_the_command_of_a_suite_says_what_it_needs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CLIPSTREAM_EVALS", "elsewhere")
    Path("configs").symlink_to(ROOT / "configs")
    (words,) = (words for words in commands() if "--suite" in words)
    assert MAINS["evaluate"](words[3:]) == 2 and "6 of 6 data sets are missing" in capsys.readouterr().err


def test_settings_of_readme_are_right(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    blocks = re.findall(r"```yaml\n(.*?)```", README.partition("## Parts of your own")[0], re.DOTALL)
    assert blocks
    for number, block in enumerate(blocks):
        Path(f"{number}.yaml").write_text(block)
        more = [] if "sources:" in block else ["--train-data", "shards/00000.tar"]
        validate_run(load(["--config", f"{number}.yaml", "--steps", "9", *more]), World())


def test_the_end_that_readme_recommends_is_right(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (line,) = re.findall(r"^    (--evals.* --train\.early-stop.*)$", README, re.M)
    data = ["--train-data", "shards/00000.tar", "--val-data", "val/00.tar", "--steps", "9"]
    settings = load([*data, *shlex.split(line)])
    validate_run(settings, World())
    assert settings.train.early_stop.metric is not None


def test_flags_that_readme_names_exist() -> None:
    from clipstream.config.flag_aliases import BY_FLAG

    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+(?![\w.-])", README))
    others = {"--config", "--help", "--print-config", "--into", *evaluate.OWN_FLAGS, *evaluate.WATCH_FLAGS}
    others |= {"--nodes", "--ntasks", "--ntasks-per-node", "--gpus-per-node", "--cpus-per-task", "--time", "--signal"}
    others |= {"--requeue", "--open-mode", "--wait"}  # Slurm's
    others |= {"--nnodes", "--nproc-per-node", "--max-restarts", "--rdzv-backend", "--rdzv-conf", "--rdzv-endpoint"}
    others |= {"--rdzv-id", "--shutdown-timeout", "--signals-to-handle"}  # torchrun's
    of_open_clip = {"--local-loss", "--gather-with-grad", "--lock-image-freeze-bn-stats"}  # in the table, as theirs
    assert named - set(BY_FLAG) - set(OWN_FLAGS) - others - of_open_clip == set()


def test_figures_carry_their_machine() -> None:
    """Whatever says how long or how fast something was on so many cores says of what machine."""
    files = [ROOT / "README.md", *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "configs").glob("*.yaml")]
    paragraphs = [text for path in files for text in re.split(r"\n\s*#?\s*\n", path.read_text(encoding="utf-8"))]
    told = [
        text
        for text in paragraphs
        if re.search(r"\b(took|takes|found|samples per second)\b.*\bcores?\b", text, re.S | re.I)
    ]
    assert len(told) > 3
    for text in told:
        assert re.search(r"\bserver|\bAVX|\bXeon|\bEPYC|\bGPU", text), text
