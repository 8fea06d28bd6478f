"""The verb bench: reading speed on this machine, and the workers that GPUs need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clipstream.cli.verbs.bench import Measured, main, needs
from clipstream.data.loader.stage_timing import StageTimes
from tests.support.models import MODEL
from tests.support.pictures import make_shards


def test_a_users_shards_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = make_shards(tmp_path, [20, 12])
    model = tmp_path / "model.json"
    model.write_text(json.dumps(MODEL))
    output = tmp_path / "bench.jsonl"
    flags = ["--train-data", "::".join(shards), "--model", str(model), "--batch-size", "8"]
    own = ["--counts", "0,2", "--seconds", "0.2", "--gpus", "4", "--gpu-rate", "1e9", "--output", str(output)]
    assert main([*flags, *own]) == 0
    said = capsys.readouterr().out
    assert "2 workers …" in said and "decode" in said and "4 GPUs that train 1,000,000,000 samples/s each" in said
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["workers"] for record in records] == [0, 2]
    for record in records:
        assert record["samples_per_s"] > 0 and record["first_batch_s"] > 0
        assert {"decode", "read", "tokenize"} <= record["stages"].keys()
    if Path("/dev/full").exists():
        assert main([*flags, "--counts", "0", "--seconds", "0.01", "--output", "/dev/full"]) == 1
        told = capsys.readouterr()
        assert "Workers" in told.out and "error: --output: cannot write /dev/full: No space" in told.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "bench requires shards"),
        (["--train-data", "a.tar", "--counts", "1,x"], "--counts: expected numbers from 0 to"),
        (["--train-data", "a.tar", "--counts", "1,999"], "not '1,999'"),
        (["--train-data", "a.tar", "--seconds", "-1"], "--seconds: expected a number above 0"),
        (["--train-data", "a.tar", "--output", "absent/a.jsonl"], "--output: cannot write absent/a.jsonl: No such"),
        (["train", "--rungs", "fused,bucket"], "--rungs: unknown setting 'bucket'; did you mean 'buckets'?"),
        (["train", "--rounds", "0"], "--rounds: expected a whole number, at least 1, not '0'"),
        (["train", "--against", "timm"], "--against: expected open_clip, not 'timm'"),
        (["train", "--csv", "absent/a.csv"], "--csv: cannot write absent/a.csv: No such"),
        (["trian", "--rounds", "1"], "unknown topic bench trian; did you mean 'train'?"),
    ],
)
def test_wrong_flags_are_told(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    assert said in capsys.readouterr().err


def test_the_workers_that_gpus_need() -> None:
    measured = Measured(workers=4, rate=1000.0, first=1.0, times=StageTimes(), samples=1)
    (few, many) = needs(measured, 2, (100.0, 3000.0), cores=4)
    assert few == "2 GPUs that train 100 samples/s each: 1 workers in all, a core each"
    assert many == "2 GPUs that train 3,000 samples/s each: 24 workers in all, a core each; here are 4 cores"
