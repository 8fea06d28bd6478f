"""The verb bench: reading speed and the workers that GPUs need; the ladder of `bench train`: rungs, files, ranks."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from clipstream.cli.verbs.bench import RUNGS, Measured, Options, main, needs
from clipstream.cli.verbs.bench.ladder import BASELINE, CHOSEN, Ladder, Row, Rung, settings_to_use, tables, with_changes
from clipstream.config.plan import survey
from clipstream.config.settings import Settings, load
from clipstream.data.loader.stage_timing import StageTimes
from clipstream.distributed.world import World
from tests.support.pictures import make_shards
from tests.support.ranks import end_ranks, launched

MODEL = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
WITHOUT_COMPILER = ",".join(name for name in RUNGS if name != "compile")
Found = dict[str, float | tuple[float, float] | str]  # by rung: samples/s, and the loss, or why it cannot run


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


def unfolded(table: str) -> str:
    """The text of a table whose last column is folded, into the width that the measured figures leave."""
    return " ".join(table.replace("│", " ").split())


@pytest.mark.ci
def test_the_ladder_of_a_small_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIPSTREAM_CAPABILITIES", "no-bf16")  # a bfloat16 rung would change the loss of those above it
    yaml = tmp_path / "use.yaml"
    assert main(flags(tmp_path, "--yaml", str(yaml), "--against", "open_clip")) == 0
    said = capsys.readouterr().out
    rows = read(tmp_path)
    assert rows["1", "tf32"]["note"].startswith("not run: train.tf32: the CPU does not support TF32")
    assert rows["2", "fsdp"]["note"] == "not run: one rank: torchrun starts several"
    assert "tf32" in said and "loss at 3" in said and "the CPU does not support TF32" in unfolded(said)
    ran = {name: row for (_, name), row in rows.items() if row["samples_per_s"]}
    assert {"baseline", "fused", "buckets", "open_clip", "checkpointing all", "shards", "patch-dropout"} <= set(ran)
    assert {"micro-batch 1", "micro-batch 4"} <= set(ran)
    base = float(rows["1", "baseline"]["loss"])
    for name, row in ran.items():
        assert float(row["lowest"]) <= float(row["samples_per_s"]) <= float(row["highest"])
        assert float(row["memory_bytes"]) >= 0 and float(row["tflops"]) > 0
        if name != "patch-dropout":  # the same weights, batches and updates, by another way
            assert float(row["loss"]) == pytest.approx(base, rel=1e-4), name
    assert float(rows["2", "shards"]["input_ms_per_sample"]) > 0
    # The settings to use are YAML for --config, and are printed.
    assert yaml.read_text() in said
    settings = load(["--config", str(yaml)])
    assert isinstance(settings.optim.fused, bool) and settings.model.text_buckets in ("auto", "off", "packed")  # type: ignore[attr-defined]


def test_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPSTREAM_CAPABILITIES", "no-bf16")
    argv = flags(tmp_path, "--rungs", "fsdp", "--rounds", "1", "--against", "open_clip")
    assert [end.code for end in end_ranks(2, launched, main, argv)] == [0, 0]
    rows = read(tmp_path)
    assert rows["2", "open_clip"]["note"] == "not run: measured on one rank only"
    assert float(rows["2", "fsdp"]["loss"]) == pytest.approx(float(rows["2", "baseline"]["loss"]), rel=1e-4)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_rungs_that_cannot_run_and_a_file_that_cannot_be_written_say_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full.csv").symlink_to("/dev/full")
    yaml = tmp_path / "use.yaml"
    own = "--rungs buckets --rounds 1 --against open_clip --lock-image --model.image.precision bf16 --yaml"
    argv = flags(tmp_path, *own.split(), str(yaml))
    text = {**MODEL["text_cfg"], "no_causal_mask": True, "pool_type": "last"}  # type: ignore[dict-item]
    siglip = {**MODEL, "custom_text": True, "init_logit_bias": -10, "text_cfg": text}
    (tmp_path / "model.json").write_text(json.dumps(siglip))
    assert main([*argv, "--csv", str(tmp_path / "full.csv")]) == 1
    said, told = capsys.readouterr()
    assert f"cannot write {tmp_path / 'full.csv'}: No space left on device" in told
    assert yaml.read_text() in said
    words = unfolded(said)
    assert "precision for locked towers" in words and "no causal mask (SigLIP)" in words


def climbed(
    found: Found, monkeypatch: pytest.MonkeyPatch, *flags: str, **options: object
) -> tuple[dict[tuple[int, str], Row], str]:
    """The rows by table and rung, and the settings to use, with these figures in place of measured ones."""

    class Batch8(list):  # type: ignore[type-arg]
        global_size = 8

    def take(self: Ladder, settings: Settings, row: Row, warmup: int, steps: int) -> str | None:
        figures = found.get(row.rung.name, found[BASELINE])
        if isinstance(figures, str):
            return figures
        rate, row.loss = figures if isinstance(figures, tuple) else (figures, 2.0)
        row.rates.append(rate)
        return None

    def keep(self: Ladder, settings: Settings) -> None:
        self.batches = [Batch8([0] * 8)] * 20  # type: ignore[list-item]

    monkeypatch.setattr(Ladder, "_keep_batches", keep)
    monkeypatch.setattr(Ladder, "take", take)
    monkeypatch.setattr(Ladder, "tflops", lambda self, settings, rate: None)
    settings = load(["--train-data", "synthetic:", "--workers", "0", *flags], ranks=1)
    own = Options(**{"rungs": ("fused", "compile", "buckets", "patch-dropout"), **options})  # type: ignore[arg-type]
    rows, chosen = Ladder(survey(settings, count=False), own, World()).climb()
    assert sum(table.row_count for table in tables(rows, 20)) == len(rows)
    return {(row.table, row.rung.name): row for row in rows}, settings_to_use(rows, chosen)


def test_a_gain_that_changes_the_result_is_flagged_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    found: Found = {BASELINE: 10, "fused": 20, "compile": (40, 2.2), "buckets": 80, "packed": 60}
    rows, yaml = climbed(found | {"patch-dropout": (90, 5.0)}, monkeypatch)
    assert rows[1, "compile"].differs and "LOSS DIFFERS by more than 1.00%" in rows[1, "compile"].record()["note"]
    assert not rows[1, "fused"].differs and rows[1, "fused"].gain(rows[1, BASELINE]) == 2
    chosen = rows[2, CHOSEN].changes
    assert chosen["optim.fused"] is True and chosen["model.text_buckets"] == "auto"
    assert chosen["train.compile"] == rows[1, BASELINE].changes["train.compile"]
    # Patch dropout has another objective: it is listed, and not among the settings to use.
    dropped = rows[2, "patch-dropout"]
    assert not dropped.differs and "different objective" in dropped.record()["note"]
    assert "patch_dropout" not in yaml and "fused: true" in yaml and "text_buckets: auto" in yaml


def test_what_cannot_run_is_left_out_of_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    found: Found = {BASELINE: 10, "fused": 20, "compile": "no compiler", "buckets": 19, "packed": 5}
    rows, yaml = climbed(found, monkeypatch)
    assert rows[1, "compile"].record()["note"] == "not run: no compiler" and not rows[1, "compile"].rates
    assert rows[1, "buckets"].before is rows[1, "fused"]
    assert "compile: blocks" not in yaml and "text_buckets: 'off'" in yaml  # slower here, although it is a default
    # Packed texts are chosen where they are faster than compiled buckets.
    for rate, kept, compiled in ((40, "packed", "'off'"), (29, "auto", "blocks")):
        found = {BASELINE: 10, "compile": 20, "buckets": 30, "packed": rate}
        _, yaml = climbed(found, monkeypatch, rungs=("compile", "buckets"))
        assert f"text_buckets: {kept}" in yaml and f"compile: {compiled}" in yaml


def test_variants_alone_measure_the_baseline_once(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = ("--distill-model", "ViT-B-32", "--distill-pretrained", "openai")
    rows, yaml = climbed({BASELINE: 10}, monkeypatch, *teacher, rungs=("patch-dropout",), against="open_clip")
    assert list(rows) == [(2, BASELINE), (2, "open_clip"), (2, "patch-dropout")]
    assert rows[2, "open_clip"].record()["note"] == "not run: measured without distillation only"
    assert yaml.endswith("no setting was measured\n")


@pytest.mark.parametrize("more", [[], ["--train.micro-batch-size", "4", "--train.kept-micro-batches", "2"]])
def test_every_rung_has_settings_that_go_together(more: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = climbed({BASELINE: 10.0}, monkeypatch, *more, rungs=RUNGS)
    settings = load(["--train-data", "synthetic:", *more], ranks=1)
    for (_, name), row in rows.items():
        if name not in ("bf16", "fsdp"):
            assert row.reason is None, name
        changed = with_changes(settings, row.changes)
        if changed.train.micro_batch_size is not None:
            assert changed.train.kept_micro_batches == settings.train.kept_micro_batches
    assert len({name for _, name in rows}) >= 12


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
        (["train", "--rounds", "0"], "--rounds: expected at least 1, not 0"),
        (["train", "--against", "timm"], "--against: expected 'open_clip', not 'timm'"),
        (["train", "--csv", "absent/a.csv"], "--csv: cannot write absent/a.csv: No such"),
        (["trian", "--rounds", "1"], "unknown topic bench trian; did you mean 'train'?"),
    ],
)
def test_wrong_flags_are_told(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    assert said in capsys.readouterr().err


def test_the_workers_that_a_step_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's rate against the step on batches in memory, not against that of the shards, which the data bound."""
    monkeypatch.setattr("clipstream.cli.verbs.bench.ladder.cores", lambda: 16)
    in_memory = Row(Rung(CHOSEN), {}, 2, rates=[9000.0, 9100.0, 9200.0])
    shards = Row(Rung("shards"), {}, 2, before=in_memory, rates=[4500.0], input_ms=4.0)
    expected = "a worker reads 250 samples/s, the step takes 9,100: 37 workers, a core each; here are 16 cores"
    assert shards.record()["note"] == expected


def test_the_workers_that_gpus_need() -> None:
    measured = Measured(workers=4, rate=1000.0, first=1.0, times=StageTimes(), samples=1)
    (few, many) = needs(measured, 2, (100.0, 3000.0), cores=4)
    assert few == "2 GPUs that train 100 samples/s each: 1 workers in all, a core each"
    assert many == "2 GPUs that train 3,000 samples/s each: 24 workers in all, a core each; here are 4 cores"
