"""`--print-config` prints the settings of a command line as YAML that reads back the same, and does nothing else."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from clipstream.cli import main
from clipstream.config.settings import load
from tests.support.commands import python
from tests.support.settings_files import OWN

ROOT = Path(__file__).parents[2]
OPEN_CLIP = (
    "--save-frequency 1 --zeroshot-frequency 1 --report-to tensorboard --train-data cc/{000..331}.tar::b.tar "
    "--val-data v.tar --warmup 1000 --batch-size 128 --accum-freq 2 --lr 1e-3 --wd 0.1 --epochs 30 --workers 8 "
    "--model RN50 --beta1 0.8 --eps 1e-7 --lr-scheduler const-cooldown --epochs-cooldown 3 --grad-checkpointing "
    "--lock-image --torchcompile --siglip --precision amp --force-image-size 192 --val-frequency 2 --lock-text "
    "--train-num-samples 10240 --cache-dir c --dataset-resampled --name mine --imagenet-val /i --imagenet-v2 i2 "
    "--aug-cfg scale=(0.4,1.0) color_jitter=(0.4,0.4,0.4,0.1) color_jitter_prob=0.8 --image-mean 0.5 0.5 0.5 "
    "--resume latest"
)
LINES = (
    "",
    "--lr 5e-4",
    "--run.name 00001 --run.seed 3",
    "--evals.e.fetch=line\x85break\u2028s",
    "--run.name 1e-3 --model.pretrained null --model.cache-dir ~",
    "--caption-json a.b;c.0 --caption-key cap --train-data a.tar",
    "--caption-json {tags|;}{b};c.0 --train-data a.tar",
    "--train-data a.csv --csv-separator \\t --csv-caption-key cap --data.sources.train.quoting false",
    "--data.sources.on.shards [a,b] --data.sources.on.weight 2 --data.sources.1.shards x",
    "--data.sources.a.shards ${DATA}/a.tar --data.batch-schedule [[5,9],[7,12]] --data.lanes 7",
    "--evals.z.type zero_shot --evals.z.classes [yes,no] --evals.z.templates ['{c}'] --evals.z.data.shards a",
    "--evals.p.type linear_probe --evals.p.data.shards a --evals.p.train-shards b",
    "--evals.m.type mean --evals.m.of {z:[top1,top5]}",
    "--loss.type clip --loss.max-logit-scale null --loss.duplicates mask",
    "--tokenizer o/n --tokenizer.context-length 20",
    "--train.early-stop.metric val/loss --train.micro-batch-size auto --train.ema 0.999",
    f"--data.sources.own.shards a --data.sources.own.caption.type {OWN} --data.sources.own.caption.depth 3",
)


def printed(*argv: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main.main([*argv]) == 0
    return out.getvalue()


def check_round_trip(argv: list[str], folder: Path) -> None:
    for more in ([], ["all"]):
        file = folder / "printed.yaml"
        file.write_text(printed("train", *argv, "--print-config", *more), encoding="utf-8")
        assert load(["--config", str(file)]) == load(argv)


@pytest.mark.parametrize("line", [OPEN_CLIP, *LINES])
def test_what_is_printed_reads_back_the_same(line: str, tmp_path: Path) -> None:
    check_round_trip(line.split(" ") if line else [], tmp_path)


@pytest.mark.parametrize("config", sorted(ROOT.glob("configs/**/*.yaml")), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_read_back_the_same(config: Path, tmp_path: Path) -> None:
    more = {
        "lit": ["--data.sources.stamps.shards=s.tar", "--evals.classes.data.shards=v.tar"],
        "groups": ["--loss.positives.by=json:sku", "--data.groups.by=json:sku"],
    }.get(config.stem, [])
    check_round_trip(["--config", str(config), "--lr=2", "--train-data=a.tar", "--val-data=v.tar", *more], tmp_path)


@examples(max_examples=12, deadline=None)  # each line alone is above
@given(
    st.sets(st.sampled_from(LINES[2:]), max_size=4),
    st.text(min_size=1).filter(lambda text: "\0" not in text),
    st.floats(0, 1e9),
    st.integers(1, 2**40),
)
def test_any_settings_read_back_the_same(lines: set[str], name: str, wd: float, samples: int) -> None:
    argv = [word for line in sorted(lines) for word in line.split(" ")]
    argv += [f"--evals.val.data.shards=a{name}", f"--optim.wd={wd!r}"]
    argv += [f"--train.epoch-samples={samples}"]
    with tempfile.TemporaryDirectory() as folder:
        check_round_trip(argv, Path(folder))


def test_only_what_differs_is_printed() -> None:
    assert yaml.safe_load(printed("train", "--lr=5e-4", "--data.prefetch=3", "--print-config")) == {}
    text = printed("train", "--print-config", "--train-data=a.tar", "--caption-json=x", "--batch-size=4")
    caption = {"type": "json", "path": "x"}
    source = {"shards": "a.tar", "caption": caption}
    assert yaml.safe_load(text) == {"data": {"global_batch_size": 4, "sources": {"train": source}}}
    assert "# data.global_batch_size is --batch-size x --accum-freq x 1 rank\n" in text
    assert yaml.safe_load(printed("train", "--print-config=all"))["optim"]["lr"] == 5e-4


def test_it_is_one_flag_with_one_value(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--print-config=some"], ["--print-config", "--print-config"]):
        assert main.main(["train", *argv]) == 2
        assert "error: --print-config: expected once, alone or as --print-config all" in capsys.readouterr().err


def test_a_password_is_printed_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["train", "--train-data=http://u:secret@h/a.tar", "--print-config"]) == 0
    told = capsys.readouterr()
    assert "shards: http://u:secret@h/a.tar" in told.out
    assert told.err.startswith("warning: data.sources.train.shards has a password or key")
    assert "secret" not in told.err


def test_rank_0_alone_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert printed("train", "--lr=1", "--print-config") == ""


VERBS = {
    "train --train-data=a.tar --resume=auto": {"data", "checkpoint"},
    "evaluate --val-data=a.tar --caption-json=x --output=a.csv": {"evals"},
    "bench --train-data=a.tar --counts=1": {"data"},
    "stage staged --val-data=a.tar --executor=local:1": {"evals"},
    "check a.tar b.tar --caption-key=cap": {"data"},
}


def test_every_verb_prints_its_settings_and_does_nothing_else(tmp_path: Path) -> None:
    code = (
        f"import os, sys\nfrom clipstream.cli import main as cli\nos.chdir({str(tmp_path)!r})\n"
        f"for line in {[*VERBS]}: print('---') or cli.main([*line.split(), '--print-config'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    ended = python("-c", code)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [set(tree) for tree in yaml.safe_load_all(ended.stdout)] == list(VERBS.values())
    assert list(tmp_path.iterdir()) == []
