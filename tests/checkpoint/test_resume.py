"""Whole runs that are killed, lose their folder, fill their disk or change their settings, and then resume."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from clipstream.checkpoint import remote_sync
from clipstream.checkpoint.store import find
from clipstream.cli.verbs.train import main
from clipstream.distributed.world import World
from tests.support.evaluating import CONFIG
from tests.support.ranks import TIMEOUT, end_ranks
from tests.support.runs import flags, go, lines, same_weights, start, train_on, wait_for_step, weights
from tests.support.savers import fill, names, small_disk


def test_a_run_goes_on_from_its_remote_copy(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    far = place / "far"
    remote = ["--remote-sync", f"file://{far}", "--val-data", f"{place}/val/*.tar", "--evals.val.every", "2"]
    remote += ["--checkpoint.keep-best", "val/text_to_image_R@1", "--checkpoint.keep-last", "1"]
    remote += ["--schedule.type", "constant"]
    assert main(flags(place, "here", *remote, steps=8)) == 0
    assert main(flags(place, "gone", *remote, steps=4)) == 0
    assert "checkpoints" in names(far / "gone") and (far / "gone" / "metrics.jsonl").exists()
    shutil.rmtree(place / "runs" / "gone")
    capsys.readouterr()
    assert main(flags(place, "gone", *remote, steps=8)) == 2
    said = capsys.readouterr().err
    assert f"file://{far}/gone has a run" in said and "--resume auto" in said
    assert main(flags(place, "gone", *remote, "--resume", "auto", steps=8)) == 0
    assert "fetching file://" in capsys.readouterr().err
    for key in ("loss", "text_to_image_R@1"):
        assert lines(place, "gone", key) == lines(place, "here", key)
    for name in ("here", "gone"):
        assert (far / name / "metrics.jsonl").read_bytes() == (place / "runs" / name / "metrics.jsonl").read_bytes()
    assert same_weights(weights(place, "gone", 8), weights(place, "here", 8))
    assert names(far / "gone" / "checkpoints") == names(far / "here" / "checkpoints")
    address = f"file://{far}/here/checkpoints/step_00000008"
    assert main(flags(place, "onward", "--resume", address, steps=10)) == 0
    assert [line["step"] for line in lines(place, "onward")] == [9, 10]


def test_changed_settings_want_approximate(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags(place, "changed", steps=4)) == 0
    again = flags(place, "changed", "--resume", "latest", "--data.global-batch-size", "20", steps=6)
    capsys.readouterr()
    assert main(again) == 2
    said = capsys.readouterr().err
    assert "data.global_batch_size: 24 -> 20" in said and "--resume-approximate" in said
    assert "data.lanes: 24 -> 20" in said, "24 lanes do not go with 20 samples"
    assert main([*again, "--resume-approximate"]) == 0
    assert "from step 4 on, the data start anew" in capsys.readouterr().err
    assert [(line["step"], line["samples"]) for line in lines(place, "changed")][3:] == [(4, 96), (5, 116), (6, 136)]
    assert main([*again, "--steps", "7"]) == 0, "the flag is no part of the settings"


def of_each_rank(place: Path, name: str, steps: int, *more: str) -> list[str]:
    """The command line of a run with `--batch-size`, which a launcher repeats on as many ranks as there are."""
    argv = flags(place, name, "--resume", "auto", *more, steps=steps)
    at = argv.index("--data.global-batch-size")
    return [*argv[:at], "--batch-size", "12", *argv[at + 2 :], "--schedule.type", "constant"]


def test_the_global_batch_stays_on_fewer_and_on_more_ranks(place: Path) -> None:
    """`--batch-size` is of a rank: on another number of ranks it would make another global batch."""
    go(flags(place, "undivided", "--schedule.type", "constant", steps=8))
    for ranks, steps in ((2, 2), (1, 4), (3, 6), (2, 8)):
        go(of_each_rank(place, "elastic", steps), ranks)
    found, wanted = lines(place, "elastic"), lines(place, "undivided")
    assert [line["samples"] for line in found] == [line["samples"] for line in wanted]
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in wanted], rel=1e-4)


def test_a_global_batch_that_does_not_go_with_the_flag_is_refused_once(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go(flags(place, "fixed", steps=2))
    capsys.readouterr()
    argv = of_each_rank(place, "fixed", 4)
    assert main(argv) == 0
    assert "the run's global batch of 24 stays: --batch-size on 1 rank would make it 12" in capsys.readouterr().out
    argv[argv.index("--batch-size") + 1] = "7"
    assert main(argv) == 2
    assert "data.global_batch_size: 24 -> 7" in capsys.readouterr().err


def test_changed_settings_of_training_are_listed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unlimited = ["--optim.grad-clip-norm", "inf"]
    assert main(flags(place, "told", *unlimited, steps=2)) == 0
    capsys.readouterr()
    same = ["--data.stall-timeout", "99", "--log.every", "2", "--checkpoint.every", "5"]
    assert main(flags(place, "told", *unlimited, *same, "--resume", "auto", steps=2)) == 0
    assert "changed" not in capsys.readouterr().out
    changed = ["--lr", "0.0002", "--wd", "0.1", "--optim.betas", "[0.8, null]", "--grad-clip-norm", "1"]
    more = ["--data.augment.scale", "[0.5, 1.0]", "--resume", "latest"]
    assert main(flags(place, "told", *changed, *more, steps=3)) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"""
^changed  data.augment.scale \[0.9, 1.0\] -> \[0.5, 1.0\]
         optim.lr 0.001 -> 0.0002
         optim.wd 0.2 -> 0.1
         optim.grad_clip_norm Infinity -> 1.0
         optim.betas null -> \[0.8, null\]
         train.steps 2 -> 3
folder """.strip(),
        said,
        re.MULTILINE,
    ), said
    lr = [line["lr"] for line in lines(place, "told")]
    assert f"changed  learning rate: {lr[1]:.2g} at step 2 -> {lr[2]:.2g} at step 3\n" in said and lr[1] != lr[2]


def test_a_longer_schedule_is_told_with_the_rates_and_the_same_one_is_not(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cosine down to nearly 0 at step 4, and up again where the same run is to have 8 steps."""
    own = ["--optim.image-lr", "0.002", "--schedule.warmup", "0"]
    assert main(flags(place, "longer", *own, "--checkpoint.every", "2", steps=4)) == 0
    shutil.copytree(place / "runs" / "longer", place / "runs" / "same")
    shutil.rmtree(place / "runs" / "same" / "checkpoints" / "step_00000004")
    (place / "runs" / "same" / "checkpoints" / "latest").write_text("step_00000002\n")
    capsys.readouterr()
    assert main(flags(place, "same", *own, "--resume", "auto", steps=4)) == 0
    assert "learning rate: " not in capsys.readouterr().out
    assert main(flags(place, "longer", *own, "--resume", "latest", steps=8)) == 0
    assert "changed  learning rate: 0.00015 at step 4 -> 0.0005 at step 5\n" in capsys.readouterr().out


def on_a_node(world: World, argv: list[str]) -> int:
    """A rank's run, on a node of its own."""
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    return main(argv)


def with_short_waits(world: World, argv: list[str]) -> int:
    """A rank's run, which tries a failed copy again at once."""
    remote_sync.BACKOFF = 0.001
    return train_on(world, argv)


def test_all_ranks_of_a_run_whose_copy_is_behind_end_with_5(place: Path, tmp_path: Path) -> None:
    """The remote folder has a folder in the place of a file."""
    (tmp_path / "far/behind/metrics.jsonl").mkdir(parents=True)
    argv = flags(place, "behind", "--remote-sync", f"file://{tmp_path}/far", steps=2)
    ends = end_ranks(2, with_short_waits, argv)
    assert [end.code for end in ends] == [5, 5], ends[0].stderr
    assert "the run is complete, but the copy in file://" in ends[0].stderr + ends[1].stderr
    assert "Traceback" not in ends[0].stderr + ends[1].stderr
    (tmp_path / "far/behind/metrics.jsonl").rmdir()
    go([*argv, "--resume", "latest"], ranks=2)
    assert (tmp_path / "far/behind/metrics.jsonl").is_file()


def test_a_save_that_fails_ends_all_ranks_with_its_message(place: Path) -> None:
    """Which is in the log of each node as well, where these are asked for."""
    folder = place / "runs" / "unwritable"
    folder.mkdir(parents=True)
    (folder / "checkpoints").touch()
    ends = end_ranks(2, on_a_node, flags(place, "unwritable", "--log-local", "--resume", "auto", steps=100_000))
    assert [end.code for end in ends] == [1, 1], ends
    assert all("error: rank 0: cannot write the checkpoint: " in end.stderr for end in ends), ends
    assert "Timed out" not in ends[0].stderr + ends[1].stderr and "Connection" not in ends[1].stderr, ends
    assert lines(place, "unwritable")[-1]["step"] < 200
    assert {"out.log", "out-1.log"} <= {*names(folder)}


def test_a_metric_that_is_never_given_is_told_before_the_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evals = ["--val-data", f"{place}/val/*.tar", "--checkpoint.keep-best", "val/image_to_text_R@2"]
    assert main(flags(place, "misnamed", *evals)) == 2
    said = capsys.readouterr().err
    assert "checkpoint.keep_best: val has no metric 'image_to_text_R@2'; choose from" in said and "did you mean" in said


def test_a_full_disk_does_not_end_a_run(place: Path, tmp_path: Path) -> None:
    """While steps are taken and lines written, a small disk fills up, and is emptied before the end."""
    (place / "tiny.json").write_text(json.dumps(CONFIG))
    with small_disk(tmp_path, "4m"):
        tiny = ["--model", f"{place}/tiny.json", "--tokenizer", "tests.tools.test_evaluate:Bytes"]
        tiny += ["--logs", f"{tmp_path}/runs", "--val-data", f"{place}/val/*.tar", "--evals.val.every", "4"]
        (process,) = start(flags(place, "full", *tiny, "--log.report", "false", steps=100_000))
        wait_for_step(tmp_path, "full", 6, process)
        ballast = fill(tmp_path, 0)
        process.wait_for_messages(b"checkpoints is full: step", b"metrics.jsonl is full: its lines wait")
        told = (tmp_path / "runs" / "full" / "metrics.jsonl").read_text()  # its last line is torn
        step = max(map(int, re.findall(r'"step": (\d+),', told)))
        checkpoints = tmp_path / "runs" / "full" / "checkpoints"
        assert find(checkpoints, "latest") is not None
        ballast.unlink()
        wait_for_step(tmp_path, "full", step + 20, process)
        process.terminate()
        _, said = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 75, said
        steps = [line["step"] for line in lines(tmp_path, "full")]
        assert steps == list(range(1, steps[-1] + 1)), "no line is lost"
        found = find(checkpoints, "latest")
        assert found is not None and int(found.name[5:]) == steps[-1]
