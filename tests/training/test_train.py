"""The verb train: files of a run, resume after a kill, several ranks, exit codes."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path

import pytest
import yaml

from clipstream.checkpoint.store import holds_a_run, lock_folder
from clipstream.cli.verbs.train import main
from clipstream.distributed.world import World
from clipstream.models.precision import resolve_precision
from tests.support.pictures import make_shards
from tests.support.ranks import end_ranks, run_ranks
from tests.support.runs import NO_LIMITS, flags, lines, same_weights, train_on, weights


@pytest.fixture(scope="module")
def whole(place: Path) -> str:
    """The name of an undisturbed run."""
    assert main(flags(place, "whole", "--workers", "1", "--val-data", f"{place}/val/*.tar")) == 0
    return "whole"


def test_a_run_leaves_what_the_contract_names(place: Path, whole: str) -> None:
    folder = place / "runs" / whole
    training = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first = next(record for record in training if "loss" in record)
    assert {"step", "samples", "loss", "lr", "grad_norm", "logit_scale", "samples_per_s", "data_wait"} <= first.keys()
    assert first["tokens_per_s"] > first["samples_per_s"] and first["tflops"] > 0 and "mfu" not in first  # on a CPU
    assert [record["samples"] for record in training if "loss" in record] == [24 * i for i in range(1, 9)]
    evaluation = next(record for record in training if "eval" in record)
    assert evaluation["eval"] == "val" and evaluation["n"] == 20
    assert 0 <= evaluation["image_to_text_R@1"] <= 1 and 0 <= evaluation["text_to_image_R@10"] <= 1
    health = [record for record in training if "health" in record][-1]["health"]["train"]
    assert health["used"] >= 8 * 24 and health["read"] == health["used"] + sum(health["dropped"].values())
    assert training[0]["start"]["ranks"] == 1 and "torch" in training[0]["start"]["versions"]
    page = (folder / "report.html").read_text()
    assert "Training images" in page and "Examples of val" in page and 24 < page.count("data:image/jpeg") <= 32
    assert (folder / "checkpoints" / "latest").read_text().strip() == "step_00000008"
    assert len(list((folder / "checkpoints").glob("step_*"))) == 3


def test_the_written_config_repeats_the_run(place: Path, whole: str) -> None:
    """Evaluations and the number of workers leave training as it is."""
    config = place / "runs" / whole / "config.yaml"
    assert main(["--config", str(config), "--name", "again", "--workers", "0", "--evals.val", "null"]) == 0
    assert lines(place, "again") == lines(place, whole) and not lines(place, "again", "eval")
    assert same_weights(weights(place, "again", 8), weights(place, whole, 8))


def test_one_process_at_a_time_trains_in_a_folder(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lock_folder(place / "runs/busy"):
        assert main(flags(place, "busy", steps=1)) == 2
        assert f"is in use by process {os.getpid()} on " in capsys.readouterr().err
    assert main(flags(place, "busy", steps=1)) == 0
    assert holds_a_run(place / "runs/busy")


def killed_with_a_worker(folder: Path) -> None:
    """Ends as by `kill -9`, while what it has forked goes on for a moment."""
    with lock_folder(folder):
        if os.fork() == 0:
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_run_goes_on_while_its_workers_end(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=killed_with_a_worker, args=(tmp_path,))
    process.start()
    process.join()  # with a time limit, it would wait for what was forked, too
    with lock_folder(tmp_path):
        assert f"process {os.getpid()} on " in (tmp_path / ".lock").read_text()


def test_a_start_that_failed_leaves_the_name_free(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags(place, "early", "--val-data", f"{place}/none.tar", steps=1)) == 3
    assert (place / "runs/early").is_dir() and not holds_a_run(place / "runs/early")
    assert main(flags(place, "early", steps=1)) == 0
    assert main(flags(place, "early", steps=1)) == 2
    error = capsys.readouterr().err
    assert "--resume auto" in error and "--name" in error
    assert main(flags(place, "absent", "--resume", "latest")) == 2
    (place / "runs/notes").mkdir()
    (place / "runs/notes/mine.txt").touch()
    assert holds_a_run(place / "runs/notes") and not holds_a_run(place / "runs/none")


def test_a_resumed_run_keeps_the_arithmetic_that_was_settled(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, auto = place / "runs/kept/config.yaml", ["--resume", "latest", "--precision", "auto"]
    assert main(flags(place, "kept", "--precision", "fp64", steps=2)) == 0
    assert main(flags(place, "kept", *auto, steps=3)) == 0
    assert "nothing left" not in capsys.readouterr().out
    assert main(flags(place, "kept", *auto, steps=1)) == 0
    assert "at step 3: nothing left to train" in capsys.readouterr().out
    assert yaml.safe_load(config.read_text())["train"]["precision"] == "fp64"


def test_the_number_of_workers_that_was_settled_is_said_and_written(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(place, "crewed", "--workers", "auto", steps=1)) == 0
    found = re.search(r"^workers  (\d) a rank: \d+ cores?, which train as well$", capfd.readouterr().out, re.M)
    assert found is not None
    assert yaml.safe_load((place / "runs/crewed/config.yaml").read_text())["data"]["workers"] == int(found[1])


def settled(world: World, narrow: list[bool]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLIPSTREAM_CAPABILITIES", "bf16" if narrow[world.rank] else "no-bf16")
        return resolve_precision("auto", world)


def test_auto_is_what_all_ranks_compute_well() -> None:
    assert [settled(World(), [narrow]) for narrow in (True, False)] == ["bf16", "fp32"]
    assert run_ranks(2, settled, [True, False]) == ["fp32", "fp32"]


def test_an_absent_caption_ends_with_exit_code_3_and_the_flag_to_use(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(place, "absent", "--caption-key", "text", *NO_LIMITS)) == 3
    error = capsys.readouterr().err
    for word in ("json", "jpg", "caption.en", "--caption-json", "--caption-key txt"):
        assert word in error
    assert "Traceback" not in error


def train_unequally(world: World, argv: list[str], more: list[str]) -> int:
    """`train_on`, with further flags on the last rank."""
    return train_on(world, [*argv, *more] if world.rank == world.size - 1 else argv)


def test_ranks_with_other_settings_end_at_once(place: Path) -> None:
    more = ["--seed", "5", "--val-data", f"{place}/val/{{00000..00001}}.tar"]
    ends = end_ranks(2, train_unequally, flags(place, "unequal"), more)
    assert [end.code for end in ends] == [2, 2]
    said = "run.seed is 0 on rank 0 and 5 on rank 1, evals is {} on rank 0 and absent on rank 1, evals.val."
    assert said in ends[0].stderr and "Traceback" not in ends[0].stderr
    assert not (place / "runs/unequal").exists()


def test_ranks_may_have_folders_of_their_own(place: Path, tmp_path: Path) -> None:
    make_shards(tmp_path / "pairs", [21, 17, 19, 5])
    more = ["--data.cache", str(tmp_path / "cache"), "--train-data", f"{tmp_path}/pairs/{{00000..00003}}.tar"]
    ends = end_ranks(2, train_unequally, flags(place, "folders", "--run.threads", "1", steps=1), more)
    assert [end.code for end in ends] == [0, 0], ends[0].stderr
