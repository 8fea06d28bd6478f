"""A command of open_clip's README runs unchanged, on small data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clipstream import train
from tests.support.models import MODEL
from tests.support.pictures import picture

# open_clip's README, "Single-process running code", with smaller numbers, fewer prompts and --name.
COMMAND = """
--save-frequency 1 --zeroshot-frequency 1 --report-to tensorboard --train-data=train_data.csv
--val-data=validation_data.csv --csv-img-key filepath --csv-caption-key title --imagenet-val=imagenet/root/val/
--warmup 2 --batch-size=8 --lr=1e-3 --wd=0.1 --epochs=1 --workers=2 --model model.json --name day-one
--evals.imagenet.templates plain
"""


def write_data(folder: Path) -> None:
    """Two manifests with pictures, and a part of ImageNet's validation folder."""
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "pictures").mkdir()
    for name, count in (("train_data", 24), ("validation_data", 6)):
        lines = ["filepath\ttitle"]
        for number in range(count):
            (folder / "pictures" / f"{name}{number}.jpg").write_bytes(picture(number))
            lines.append(f"pictures/{name}{number}.jpg\tpicture, number {number}")
        (folder / f"{name}.csv").write_text("\n".join(lines))
    for number, synset in enumerate(("n01440764", "n03417042", "n15075141")):
        (folder / "imagenet" / "root" / "val" / synset).mkdir(parents=True)
        (folder / "imagenet" / "root" / "val" / synset / "a.JPEG").write_bytes(picture(number))


def test_a_command_of_open_clips_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLIPSTREAM_CACHE", str(tmp_path / "cache"))
    assert train.main(COMMAND.split()) == 0
    run = Path("runs/day-one")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = {line["eval"]: line for line in lines if "eval" in line}
    assert evaluations["imagenet"]["n"] == 3 and evaluations["imagenet"]["chance"] == 1 / 1000
    assert evaluations["val"]["n"] == 6
    assert [line["step"] for line in lines if "loss" in line][-1] == 3  # 24 samples, 8 a step
    assert (run / "checkpoints" / "step_00000003").is_dir() and list((run / "tensorboard").iterdir())
    assert "1 manifest, 24 samples" in capsys.readouterr().out
