"""The verb `bench train`: rungs, tables, files, settings to use, ranks."""

from __future__ import annotations

import csv
import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from clipstream.cli.verbs.bench import ladder, main
from clipstream.cli.verbs.bench.ladder import Ladder
from clipstream.cli.verbs.bench.options import NAMES, Options
from clipstream.cli.verbs.bench.results import Row, settings_to_use, tables
from clipstream.cli.verbs.bench.rungs import BASELINE, CHOSEN, SPEED, VARIANTS, Rung, with_changes
from clipstream.cli.verbs.bench.turns import Turn, Turns, UnableError
from clipstream.config.settings import Settings, load
from clipstream.distributed.world import World
from tests.support.pictures import make_shards
from tests.support.ranks import end_ranks

MODEL = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
WITHOUT_COMPILER = ",".join(name for name in NAMES if name != "compile")


def flags(folder: Path, *more: str) -> list[str]:
    """A quick ladder on a tiny model."""
    (folder / "model.json").write_text(json.dumps(MODEL))
    shards = "::".join(make_shards(folder / "pairs", [20, 12]))
    return [
        "train", "--train-data", shards, "--model", str(folder / "model.json"), "--data.global-batch-size", "8",
        "--workers", "1", "--device", "cpu", "--run.threads", "1", "--rounds", "2", "--steps", "1",
        "--warmup-steps", "1", "--loss-steps", "3", "--rungs", WITHOUT_COMPILER, "--csv",
        str(folder / "ladder.csv"), *more,
    ]  # fmt: skip


def read(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    """The CSV file by table and rung."""
    with (folder / "ladder.csv").open(newline="") as file:
        return {(row["table"], row["rung"]): row for row in csv.DictReader(file)}


def test_the_ladder_of_a_small_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIPSTREAM_CAPABILITIES", "no-bf16")  # a bfloat16 rung would change the loss of those above it
    yaml = tmp_path / "use.yaml"
    argv = flags(tmp_path, "--yaml", str(yaml), "--plot", str(tmp_path / "p.svg"), "--against", "open_clip")
    assert main(argv) == 0
    said, told = capsys.readouterr()
    rows = read(tmp_path)
    assert ("1", "tf32") in rows and rows["1", "tf32"]["note"] == "not run: no GPU"
    assert rows["2", "fsdp"]["note"] == "not run: one rank: torchrun starts several"
    assert "tf32" in said and "not run: no GPU" in said and "loss at 3" in said
    ran = {key: row for key, row in rows.items() if row["samples_per_s"]}
    names = {name for _, name in ran}
    assert {"baseline", "fused", "buckets", "open_clip", "checkpointing all", "micro-batch 4", "shards"} <= names
    assert rows["1", "packed"]["note"] == "not run: model.text_buckets: auto packs texts here, too"
    assert {"micro-batch 1", "patch-dropout"} <= names
    base = float(rows["1", "baseline"]["loss"])
    for (_, name), row in ran.items():
        assert float(row["lowest"]) <= float(row["samples_per_s"]) <= float(row["highest"])
        assert float(row["memory_bytes"]) >= 0 and float(row["tflops"]) > 0
        if name != "patch-dropout":  # the same weights, batches and updates, by another way
            assert float(row["loss"]) == pytest.approx(base, rel=1e-4), name
    assert float(rows["2", "shards"]["input_ms_per_sample"]) > 0
    # The settings to use are YAML for --config, and are printed.
    assert yaml.read_text() in said
    settings = load(["--config", str(yaml)])
    assert isinstance(settings.optim.fused, bool) and settings.model.text_buckets in ("auto", "off", "packed")  # type: ignore[attr-defined]
    assert (tmp_path / "p.svg").exists() != ("--plot is skipped, as matplotlib is not installed" in told)


def bench_on(world: World, argv: list[str]) -> int:
    """A rank's ladder, as a launcher starts it."""
    os.environ.update(
        RANK=str(world.rank), WORLD_SIZE=str(world.size), LOCAL_RANK=str(world.rank), LOCAL_WORLD_SIZE=str(world.size)
    )
    return main(argv)


def test_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPSTREAM_CAPABILITIES", "no-bf16")
    argv = flags(tmp_path, "--rungs", "fused,fsdp,shards", "--rounds", "1", "--against", "open_clip")
    assert [end.code for end in end_ranks(2, bench_on, argv)] == [0, 0]
    rows = read(tmp_path)
    assert rows["2", "open_clip"]["note"] == "not run: measured on one rank only"
    losses = [float(rows[key]["loss"]) for key in (("1", "baseline"), ("1", "fused"), ("2", "fsdp"), ("2", "shards"))]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-4)


def test_open_clip_has_no_precision_for_one_tower(tmp_path: Path) -> None:
    more = ("--lock-image", "--model.image.precision", "bf16")
    assert main(flags(tmp_path, "--rungs", "tf32", "--rounds", "1", "--against", "open_clip", *more)) == 0
    row = read(tmp_path)["2", "open_clip"]
    assert row["note"] == "not run: open_clip's trainer has no precision for a locked tower alone"


def test_texts_that_cannot_be_cut_have_no_figure_for_buckets(tmp_path: Path) -> None:
    argv = flags(tmp_path, "--rungs", "buckets", "--rounds", "1")
    text = {**MODEL["text_cfg"], "no_causal_mask": True, "pool_type": "last"}  # type: ignore[dict-item]
    siglip = {**MODEL, "custom_text": True, "init_logit_bias": -10, "text_cfg": text}
    (tmp_path / "model.json").write_text(json.dumps(siglip))
    assert main(argv) == 0
    row = read(tmp_path)["1", "buckets"]
    assert "no causal mask (SigLIP)" in row["note"] and not row["samples_per_s"]


def climbed(
    found: dict[str, Turn | str], monkeypatch: pytest.MonkeyPatch, *flags: str, **options: object
) -> tuple[list[Row], str]:
    """The rows and the settings to use, with these turns in place of measured ones, by rung; texts are reasons."""

    class Batch8(list):  # type: ignore[type-arg]
        global_size = 8

    def take(self: Turns, settings: Settings, rung: Rung, warmup: int, steps: int) -> Turn:
        turn = found.get(rung.name, found["baseline"])
        if isinstance(turn, str):
            raise UnableError(turn)
        return replace(turn, losses=turn.losses * (warmup + steps))

    def start(self: Turns, *args: object, **kwargs: object) -> None:
        self.batches = [Batch8([0] * 8)] * 20  # type: ignore[list-item]
        self.padded, self.packs = None, True

    monkeypatch.setattr(Turns, "__init__", start)
    monkeypatch.setattr(Turns, "take", take)
    monkeypatch.setattr(Turns, "tflops", lambda self, settings, rate: None)
    settings = load(["--train-data", "synthetic:", "--workers", "0", *flags], ranks=1)
    climbing = Ladder(
        settings, Options(**{"rungs": ("fused", "compile", "buckets", "patch-dropout"), **options}), World()
    )  # type: ignore[arg-type]
    rows, chosen = climbing.climb()
    return rows, settings_to_use(rows, chosen)


def turn(rate: float, loss: float = 2.0) -> Turn:
    return Turn(rate, 1 << 20, (loss,), 0.1, None)


def test_a_gain_that_changes_the_result_is_flagged_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Turn | str] = {"baseline": turn(10), "fused": turn(20), "compile": turn(40, loss=2.2)}
    rows, yaml = climbed(found | {"buckets": turn(80), "patch-dropout": turn(90, loss=5.0)}, monkeypatch)
    by_name = {(row.table, row.rung.name): row for row in rows}
    assert by_name[1, "compile"].flagged and "LOSS DIFFERS by more than 1.00%" in by_name[1, "compile"].note()
    assert not by_name[1, "fused"].flagged and by_name[1, "fused"].gain(by_name[1, BASELINE]) == 2
    assert (
        by_name[2, CHOSEN].changes["optim.fused"] is True and by_name[2, CHOSEN].changes["model.text_buckets"] == "auto"
    )
    off = by_name[1, BASELINE].changes["train.compile"]
    assert by_name[2, CHOSEN].changes["train.compile"] == off
    # Patch dropout has another objective: it is listed, and not among the settings to use.
    assert not by_name[2, "patch-dropout"].flagged and "another objective" in by_name[2, "patch-dropout"].note()
    assert "patch_dropout" not in yaml and "fused: true" in yaml and "text_buckets: auto" in yaml
    assert [table.row_count for table in tables(rows, 20)] == [5, 3]


def test_what_cannot_run_is_left_out_of_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Turn | str] = {"baseline": turn(10), "fused": turn(20), "compile": "no compiler"}
    rows, yaml = climbed(found | {"buckets": turn(19)}, monkeypatch)
    by_name = {(row.table, row.rung.name): row for row in rows}
    assert by_name[1, "compile"].note() == "not run: no compiler" and not by_name[1, "compile"].rates
    assert by_name[1, "buckets"].before is by_name[1, "fused"]
    assert "compile" not in yaml and "text_buckets: 'off'" in yaml  # slower here, although it is a default


def test_packed_texts_are_chosen_where_they_are_faster_than_compiled_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Turn | str] = {"baseline": turn(10), "compile": turn(20), "buckets": turn(30)}
    for rate, kept, compiled in ((40, "packed", "'off'"), (29, "auto", "blocks")):
        rows, yaml = climbed(found | {"packed": turn(rate)}, monkeypatch, rungs=("compile", "buckets"))
        assert f"text_buckets: {kept}" in yaml and f"compile: {compiled}" in yaml
        assert next(row for row in rows if row.rung.name == "packed").rates


def test_packed_texts_are_not_measured_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Turn | str] = {"baseline": turn(10), "buckets": turn(30), "packed": turn(40)}
    for buckets, runs in (("auto", False), ("2", True)):
        rows, yaml = climbed(found, monkeypatch, "--model.text-buckets", buckets, rungs=("buckets",))
        assert bool(next(row for row in rows if row.rung.name == "packed").rates) == runs
        assert f"text_buckets: {'packed' if runs else 'auto'}" in yaml and ("compile:" in yaml) == runs


def test_open_clip_is_not_compared_with_a_run_that_distills(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = ("--distill-model", "ViT-B-32", "--distill-pretrained", "openai")
    rows, _ = climbed({"baseline": turn(10)}, monkeypatch, *teacher, open_clip=True)
    (row,) = (row for row in rows if row.rung.open_clip)
    assert row.note() == "not run: measured without distillation only"


def test_variants_alone_measure_the_baseline_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, yaml = climbed({"baseline": turn(10)}, monkeypatch, rungs=("patch-dropout",))
    assert [(row.table, row.rung.name) for row in rows] == [(2, BASELINE), (2, "patch-dropout")]
    assert yaml.endswith("# no setting was measured\n")


@pytest.mark.parametrize("more", [[], ["--train.micro-batch-size", "4", "--train.kept-micro-batches", "auto"]])
def test_every_rung_has_settings_that_go_together(more: list[str]) -> None:
    from clipstream.cli.verbs.bench.rungs import Machine, plain

    settings = load(["--train-data", "synthetic:", *more], ranks=1)
    base = plain(settings, NAMES)
    with_changes(settings, base)
    machine = Machine("cuda:0", "bf16", ranks=2, batch=8, shards=True)
    names = []
    for make in (*SPEED.values(), *VARIANTS.values()):
        for rung in make(settings, machine):
            assert rung.reason is None
            changed = with_changes(settings, {**base, **rung.changes})
            if changed.train.micro_batch_size is not None:
                assert changed.train.kept_micro_batches == settings.train.kept_micro_batches
            names.append(rung.name)
    assert len(set(names)) == len(names) >= 12


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--rungs", "fused,bucket"], "--rungs: there is no 'bucket'; did you mean 'buckets'?"),
        (["--rounds", "0"], "--rounds: expected a whole number, at least 1, not '0'"),
        (["--against", "timm"], "--against: expected open_clip, not 'timm'"),
        (["--csv", "absent/a.csv"], "--csv: absent/a.csv cannot be written (No such"),
        (["--plot", "a.txt"], "--plot: expected a name that ends in .svg or .png"),
        (["--loss-tolerance", "x"], "--loss-tolerance: expected a number"),
    ],
)
def test_wrong_flags_are_told(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *argv]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_costs_the_file_that_was_to_be_written_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full.csv").symlink_to("/dev/full")
    yaml = tmp_path / "use.yaml"
    argv = flags(tmp_path, "--rungs", "fused", "--rounds", "1", "--yaml", str(yaml))
    assert main([*argv, "--csv", str(tmp_path / "full.csv")]) == 1
    said, told = capsys.readouterr()
    assert f"{tmp_path / 'full.csv'} could not be written (No space left on device)" in told
    assert yaml.read_text() in said


def test_files_are_written_where_nobody_reads_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*args: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(ladder, "show", closed)
    with suppress(BrokenPipeError):
        main(flags(tmp_path, "--rungs", "fused", "--rounds", "1"))
    assert ("1", "fused") in read(tmp_path)


def test_a_misspelt_train_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian", "--rounds", "1"]) == 2
    assert "there is no bench trian; did you mean 'train'?" in capsys.readouterr().err


def test_help_names_the_rungs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    said = capsys.readouterr().out
    assert "clipstream bench train" in said and "--against" in said and "micro-batch" in said
