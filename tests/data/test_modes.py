"""Sampling modes in whole runs: messages at the start, counts, resume across the end of epochs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from clipstream.cli.verbs.train import main
from tests.support.runs import flags, lines, same_weights, weights

EXACT = ["--data.sampling.mode=indexed", "--data.sampling.remainder=pad", "--checkpoint.keep-last=9"]


@pytest.mark.parametrize("mode", ["indexed", "epoch"])
def test_a_run_goes_on_across_epochs_ends_with_the_same_bits(
    place: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    epoch = ["--data.sampling.mode=epoch", "--data.lanes=2", "--checkpoint.keep-last=9"]
    more = EXACT if mode == "indexed" else epoch
    assert main(flags(place, mode, *more, "--workers=3")) == 0
    out = capsys.readouterr().out
    if mode == "epoch":
        assert "workers  2 a rank: 2 lanes for 3 workers on each of 1 ranks" in out and ", 2 workers a rank" in out
    runs = place / "runs"
    shutil.copytree(runs / mode, runs / f"{mode}2")
    for step in (4, 6, 8):
        shutil.rmtree(runs / f"{mode}2/checkpoints/step_{step:08d}")
    assert main(flags(place, f"{mode}2", *more, "--resume=latest", "--workers=0")) == 0
    assert lines(place, f"{mode}2") == lines(place, mode)
    assert same_weights(weights(place, mode, 8), weights(place, f"{mode}2", 8))
    if mode == "indexed":
        assert "epoch    3 steps for 62 samples (train 62); remainder pad: 10 places are padding each time\n" in out
        for run in (mode, f"{mode}2"):
            health = [line["health"]["train"] for line in lines(place, run, "health")]
            assert [counts.get("padded", 0) for counts in health] == [0, 20]
        assert [round(line["epoch"], 3) for line in lines(place, mode)] == [round(i / 3, 3) for i in range(1, 9)]


def test_epochs_of_an_indexed_run_are_whole(place: Path) -> None:
    argv = [flag for flag in flags(place, "epochs", *EXACT) if flag not in ("--steps", "8", "--checkpoint.every", "2")]
    assert main([*argv, "--epochs=2", "--checkpoint.every-epochs=1"]) == 0
    assert [line["step"] for line in lines(place, "epochs")] == list(range(1, 7))
    saved = sorted(path.name for path in (place / "runs/epochs/checkpoints").glob("step_*"))
    assert saved == ["step_00000003", "step_00000006"]
    again = ["--config", f"{place}/runs/epochs/config.yaml", "--name", "epochs2", "--logs", f"{place}/runs"]
    assert main(again) == 0, "the settings that were written down are right by themselves"
    assert lines(place, "epochs2") == lines(place, "epochs")


def test_batches_that_hold_samples_more_than_once_are_warned_of(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    masked = ["--loss.duplicates=mask", "--loss.duplicates-by=pictures"]
    for mode, more in (("epoch", []), ("resampled", masked)):
        argv = [f"--data.sampling.mode={mode}", "--data.global-batch-size=96", "--workers=0", *more]
        assert main(flags(place, f"few-{mode}", *argv, steps=1)) == 0
        said = capsys.readouterr().err
        found = re.search(r"first batch of 96 samples holds only (\d+) different ones.*--loss.duplicates mask", said)
        assert (found is None) is (mode == "resampled"), said
        assert found is None or int(found[1]) <= 62
