"""The verb evaluate: from a run's folder or a checkpoint to a table and files, on one and two ranks."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from clipstream.checkpoint.store import locate, resolve_model_name
from clipstream.cli.verbs.evaluate import main
from clipstream.cli.verbs.train import main as train
from clipstream.config.config_file import dump
from clipstream.config.settings import Settings, load
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.evals.context import of_weights
from clipstream.evals.retrieval_and_loss import Retrieval
from clipstream.evals.settings import RetrievalSettings
from clipstream.models.build import build_towers
from clipstream.models.settings import ModelSettings
from clipstream.report.records import table_lines
from clipstream.report.terminal import table
from clipstream.training.state import TrainState
from tests.support import hubtree
from tests.support.browser import look, needs_browser
from tests.support.evaluating import CONFIG, context_of, tiny_towers
from tests.support.pictures import ByteTokenizer, make_shards, photo
from tests.support.runs import flags as run_flags
from tests.support.runs import furnish
from tests.support.runs import lines as run_lines
from tests.support.savers import damage, fill, saver_of, small_disk

BYTES = {"type": "tests.tools.test_evaluate:Bytes"}


class Bytes(ByteTokenizer):
    """The tests' tokenizer as a user's own."""

    def __init__(self, settings: Any) -> None:
        """Constructed with its settings."""


def evaluate(run: Path, *words: str) -> int:
    """Evaluate a run, with the flag that allows the tokenizer of its own settings."""
    return main([str(run), *words, "--config", f"{run}/config.yaml"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder as training leaves it, with one checkpoint."""
    folder: Path = tmp_path_factory.mktemp("logs") / "tiny"
    make_shards(folder.parent / "pairs", [9, 12])
    data = {"shards": f"{folder.parent}/pairs/*.tar"}
    settings = {
        "run": {"device": "cpu", "threads": 1},
        "data": {"workers": 0},
        "tokenizer": BYTES,
        "train": {"precision": "fp32"},
        "evals": {
            "val": {"type": "retrieval", "data": data, "batch_size": 8},
            "kinds": {"type": "zero_shot", "data": data, "classes": ["a", "b", "c"], "templates": "plain"},
        },
    }
    towers = tiny_towers()
    model = towers, torch.optim.AdamW(towers.parameters())
    saver = saver_of(folder / "checkpoints", model=model, keep_best="val/loss")
    saver.save(TrainState(7))
    saver.on_eval([{"step": 7, "eval": "val", "loss": 1.0}])
    assert saver.finish()
    (folder / "config.yaml").write_text(dump(Settings.model_validate(settings)))
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_checkpoint_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--checkpoint", f"{run}/checkpoints/step_00000007", "--config", f"{run}/config.yaml"]) == 0
    val, kinds = lines(run / "metrics.jsonl")
    expected = dict(Retrieval(RetrievalSettings.model_validate(val["settings"]))(context_of(World())))
    assert {name: val[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert (val["step"], val["eval"], val["checkpoint"], val["n"]) == (7, "val", "step_00000007", 21)
    assert (kinds["eval"], kinds["top5"], kinds["settings"]["classes"]) == ("kinds", 1.0, ["a", "b", "c"])
    shown = capsys.readouterr().out
    assert "image_to_text_R@10" in shown and "chance" in shown and "metrics.jsonl" in shown


FROZEN = ("--lock-image", "--model.image.precision", "bf16")


@pytest.mark.parametrize(
    "more",
    [
        ("bf16", "--train.compile", "towers", "--train.compile-backend", "eager"),
        ("pure_bf16", "--train.ema", "0.5"),
        ("fp32", *FROZEN),
    ],
    ids=" ".join,
)
def test_figures_are_those_of_the_run(more: tuple[str, ...], tmp_path: Path) -> None:
    place = furnish(tmp_path)
    given = ("--precision", *more, "--val-data", f"{place}/val/*.tar", "--checkpoint.every", "4")
    assert train(run_flags(place, "run", *given, steps=4)) == 0
    assert main(["--checkpoint", f"{place}/runs/run", "--output", f"{tmp_path}/out.jsonl"]) == 0
    (found,) = lines(tmp_path / "out.jsonl")
    (trained,) = run_lines(place, "run", "eval")
    same = {name for name, value in trained.items() if isinstance(value, float) and name != "time"}
    assert len(same) > 6 and {name: found[name] for name in same} == {name: trained[name] for name in same}
    assert found["precision"] == more[0]


def test_any_folder_that_open_clip_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_towers().save_pretrained(tmp_path / "model")
    make_shards(tmp_path / "pairs", [5])
    argv = ["--checkpoint", str(tmp_path / "model"), "--val-data", f"{tmp_path}/pairs/*.tar", "--device", "cpu"]
    argv += ["--tokenizer", BYTES["type"], "--workers", "0", "--run.threads", "1", f"--output={tmp_path}/out.jsonl"]
    assert main(argv) == 2 and "tokenizer" in capsys.readouterr().err
    assert main([*argv, "--model.allow-mismatch"]) == 0
    (record,) = lines(tmp_path / "out.jsonl")
    assert (record["step"], record["n"], record["checkpoint"]) == (0, 5, "model")


def test_a_model_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a configuration and open_clip's own checkpoint, and by a name on the Hub; figures as CSV."""
    make_shards(tmp_path / "pairs", [5, 4])
    common = ["--device", "cpu", "--workers", "0", "--run.threads", "1", "--out", f"{tmp_path}/out.csv"]
    common += ["--val-data", f"{tmp_path}/pairs/*.tar", "--model.allow-mismatch"]
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(CONFIG))
    clip = tiny_towers(3).clip
    torch.save({"epoch": 1, "state_dict": {f"module.{k}": v for k, v in clip.state_dict().items()}}, tmp_path / "e.pt")
    own = ["--model", str(config), "--pretrained", f"{tmp_path}/e.pt", "--tokenizer", BYTES["type"]]
    assert main([*own, *common]) == 0
    snapshot = hubtree.build(tmp_path / "hub")
    hub = ["--model", f"hf-hub:{hubtree.REPO}", "--cache-dir", str(tmp_path / "hub")]
    assert main([*hub, *common]) == 0
    shown = capsys.readouterr().out
    assert f"{config} {tmp_path}/e.pt on val" in shown and f"hf-hub:{hubtree.REPO} on val" in shown
    with (tmp_path / "out.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "image_to_text_R@1"]
    assert [row["n"] for row in rows] == ["9", "9"] and rows[0]["pretrained"] == f"{tmp_path}/e.pt"
    saved = build_towers(ModelSettings(name=f"local-dir:{snapshot}"), seed=0)
    expected = [of_weights(towers.state_dict()) for towers in (tiny_towers(3), saved)]
    assert [line["weights"] for line in lines(tmp_path / "out.jsonl")] == expected
    assert main(["--checkpoint", f"{tmp_path}/e.pt"]) == 2
    assert "use --model NAME --pretrained FILE" in capsys.readouterr().err


@needs_browser
def test_a_page_with_the_pictures_of_each_evaluation(run: Path, tmp_path: Path) -> None:
    page, pairs = tmp_path / "pages" / "page.html", f"{run.parent}/pairs/*.tar"
    flags = ["--evals.val.data.shards", pairs, "--evals.kinds.data.shards", pairs,
             "--evals.val.prompts", "[ein großer Hund]", "--evals.bad", "{type: zero_shot, classes: [a, b], templates: "
             f"plain, data: {{shards: {run}/none.tar}}}}", "--output", f"{tmp_path}/out.csv"]  # fmt: skip
    assert evaluate(run, *flags, "--report", str(page)) == 3
    dom, complaints = look(page, 400)
    assert complaints == []
    assert "<h1>tiny step_00000007</h1>" in dom and "<h4>“ein großer Hund”</h4>" in dom and "Found: images" in dom
    assert "Examples of kinds" in dom and "the worst classes" in dom and dom.count("data:image/jpeg") > 20
    assert re.search(r"failed at step 7: evals.bad: .*none.tar does not exist", dom)
    assert "<h2>Training</h2>" not in dom and "0 steps" not in dom, "there is none to tell of"
    assert not list(run.glob("pictures")), "the run's own stay what they are"


def test_files_that_cannot_be_written_are_told_before_and_cost_no_other_figures(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    val_alone = ["--evals.kinds", "null", "--output"]
    (tmp_path / "file").touch()
    for flag, path in (("--output", tmp_path), ("--report", tmp_path), ("--output", tmp_path / "file" / "x.csv")):
        assert evaluate(run, *val_alone, str(tmp_path / "out.jsonl"), flag, str(path)) == 2
        shown = capsys.readouterr()
        assert f"{flag}: cannot write" in shown.err
        assert "on val" not in shown.out and not (tmp_path / "out.jsonl").exists()
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, "64k"):
        output = disk / "out.jsonl"
        ballast = fill(disk, 4096)  # of which the first lines leave little
        codes = [evaluate(run, *val_alone, str(output)) for _ in range(5)]
        shown = capsys.readouterr()
        assert codes[0] == 0 and codes[-1] == 1 and "image_to_text_R@10" in shown.out
        assert f"warning: cannot write {output}: No space left" in shown.err
        assert f"error: {output} is incomplete" in shown.err
        ballast.unlink()
        assert evaluate(run, *val_alone, str(output)) == 0
        assert all(json.loads(line)["eval"] == "val" for line in output.read_text().splitlines()), "no line is torn"


def test_what_fails_is_told_at_the_end_and_by_the_exit_code(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = ["--evals.bad", f"{{type: retrieval, data: {{shards: {run}/none.tar}}}}"]
    kinds = ["--evals.kinds", "null", "--output", str(run / "some.jsonl")]
    val = ["--val-data", f"{run.parent}/pairs/*.tar"]
    assert evaluate(run, *val, *kinds, *bad) == 3
    shown = capsys.readouterr()
    assert "image_to_text_R@10" in shown.out and shown.err.count("evaluation 'bad' failed") == 1
    assert shown.err.splitlines()[-1].startswith("error: evals.bad: ")
    made, failed = lines(run / "some.jsonl")
    assert made["n"] == 21 and failed["eval"] == "bad" and "none.tar does not exist" in failed["error"]
    assert evaluate(run, *kinds, *bad, "--evals.val", "null") == 3
    alone = capsys.readouterr()
    assert "metric" not in alone.out, "no table without figures"
    assert all(text.count("none.tar does not exist") == 1 for text in (shown.err, alone.err)), "the reason once"
    assert evaluate(run, *kinds, *bad, "--evals.val", bad[1].replace("none", "no")) == 3
    both = capsys.readouterr().err.splitlines()
    assert [line[:17] for line in both if line.startswith("error")] == ["error: evals.val:", "error: evals.bad:"]


def test_every_setting_that_names_a_model_takes_a_run_and_a_repository(run: Path, tmp_path: Path) -> None:
    step = run / "checkpoints" / "step_00000007"
    for path in (run, run / "checkpoints" / "best", run / "checkpoints" / "latest"):
        assert (locate(str(path)).step, locate(str(path)).run) == (7, run)
    for path in (run, step, run / "checkpoints" / "best", f"local-dir:{run}", f"local-dir:{step}"):
        assert resolve_model_name(str(path)) == f"local-dir:{step}"
    others = {"org/A.b-1@v1": "hf-hub:org/A.b-1@v1", "hf-hub:o/n": "hf-hub:o/n"}
    same = ("ViT-B-32", "ViT-B/32", "openai", "my/small.json", "no/epoch_1.pt", f"{run}/no", f"{step}/COMPLETE")
    assert {text: resolve_model_name(text) for text in (*others, *same)} == others | dict(zip(same, same, strict=True))
    weights = f"{step}/open_clip_model.safetensors"
    for flags, expected in (
        ((f"--pretrained={run}",), (f"local-dir:{step}", None)),
        ((f"--model={weights}",), (f"local-dir:{step}", weights)),
        ((f"--pretrained={weights}",), (f"local-dir:{step}", weights)),
        ((f"--pretrained={run}", "--model=RN50"), ("RN50", f"local-dir:{step}")),
        (("--pretrained=openai",), ("ViT-B-32", "openai")),
        (("--model=org/name",), ("hf-hub:org/name", None)),
    ):
        model = load(flags).model
        assert (model.name, model.pretrained) == expected
    teacher = load([f"--distill-model={run}"]).distill.teacher(ModelSettings())
    assert teacher is not None and teacher.name == f"local-dir:{step}"
    (tmp_path / "config.yaml").touch()
    with pytest.raises(SettingsError, match=f"^--pretrained: .*{tmp_path.name} is a run without a checkpoint"):
        load([f"--pretrained={tmp_path}"])


def test_damaged_weights_are_no_model_and_damaged_moments_do_not_matter(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    folder = copy / "checkpoints" / "step_00000007"
    damage(folder / "optimizer.safetensors")
    assert locate(str(copy)).step == 7
    damage(folder / "open_clip_model.safetensors")
    with pytest.raises(SettingsError, match="damaged: open_clip_model"):
        locate(str(folder))
    (folder / "COMPLETE").unlink()
    for path in (copy, folder):
        with pytest.raises(SettingsError, match="no complete checkpoint"):
            locate(str(path))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "--val-data"),
        ("--checkpoint", "--checkpoint: requires a value"),
        ("--checkpoint {tmp}/no", "does not exist"),
        ("--checkpoint {tmp}", "open_clip_config.json"),
        ("--checkpoint {run} --config {run}/config.yaml --evals.val.prompts=[cat]", "requires --report FILE.html"),
        (
            "--checkpoint {run} --config {run}/config.yaml --evals.val.prompts=[cat] --report {tmp}/x.html "
            "--log.pictures 0",
            "evals.val.prompts: requires log.pictures above 0",
        ),
        ("--checkpoint {run} --model ViT-B-32", "--model"),
    ],
)
def test_what_is_wrong_is_told(words: str, told: str, run: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(words.format(tmp=tmp_path, run=run).split()) == 2
    assert told in capsys.readouterr().err


def test_wrong_evaluators_are_told_before_any_model_is_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {"type": "zero_shot", "data": {"shards": "a.tar"}, "classes": "none.txt", "templates": ["no place"]}
    gone = {"type": "zero_shot", "data": {"shards": f"benchmark:{tmp_path}/none"}}
    evals = ["--evals.kinds", json.dumps(kinds), "--evals.bare", "{type: retrieval}", "--evals.gone", json.dumps(gone)]
    assert main(["--model", "no-such-model", *evals]) == 2
    told = capsys.readouterr().err
    for said in ("cannot read the file 'none.txt'", "'no place' has no {c}", "the evaluator has no data",
                 f"evals.gone.classes: {tmp_path}/none does not exist"):  # fmt: skip
        assert said in told, said
    assert "no-such-model" not in told


def test_the_table() -> None:
    record = {"step": 7, "eval": "val", "image_to_text_R@1": 0.25, "n": 8, "chance_R@1": 0.125, "seconds": 1.5}
    assert table([record]) == (
        "evaluation  metric             value  95% interval  chance\n"
        "val         image_to_text_R@1  25.0%     7.1-59.1%   12.5%\n"
        "val         n                      8\n"
        "val         seconds             1.5s"
    )


@pytest.mark.parametrize(
    ("right", "n", "shown"), [(0, 10, "0.0-27.8%"), (10, 10, "72.2-100.0%"), (81, 263, "25.5-36.6%")]
)
def test_intervals_are_wilsons(right: int, n: int, shown: str) -> None:  # 81 of 263: Newcombe, Stat. Med. 17, 1998
    record = {"step": 7, "eval": "val", "top1": right / n, "n": n, "dropped": 0}
    assert table([record]).splitlines()[1].split() == ["val", "top1", f"{100 * right / n:.1f}%", shown]


def test_losses_places_and_counts_are_no_shares() -> None:
    record = {"step": 7, "eval": "val", "val_loss": 0.5, "text_to_image_median_rank": 1.0, "batches": 1, "top1": 1.0}
    assert [line.split()[1:] for line in table([record]).splitlines()[1:]] == [
        ["val_loss", "0.5"], ["text_to_image_median_rank", "1"], ["batches", "1"], ["top1", "100.0%"],
    ]  # fmt: skip


def test_counts_of_languages_alone_are_left_out() -> None:
    """An evaluator's own n_ metrics stay, such as n_train of a linear probe."""
    probe = {"step": 7, "eval": "probe", "top1": 0.5, "n": 8, "n_train": 9}
    assert [line.split()[1] for line in table([probe]).splitlines()[1:]] == ["top1", "n", "n_train"]
    assert "n_train" in table_lines(probe, head=False)
    two = {"step": 7, "eval": "two", "n": 8, "mean_top1": 0.5, "languages": 1, "de_top1": 0.5, "n_de": 7}
    assert [line.split()[1] for line in table([two]).splitlines()[1:]] == ["n", "mean_top1", "languages", "de_top1"]
    assert not {"n_de", "languages"} & {row.split(",")[6] for row in table_lines(two, head=False).splitlines()}


def test_a_run_and_data_are_named_as_in_search(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The data are read as the run's, alone, without the run's own evaluators; classes by name from a column."""
    kinds = ["red thing", "Blue thing", "green"]
    rows = []
    for number in range(12):
        Image.new("RGB", (16, 16), (20 * number, 0, 0)).save(tmp_path / f"{number}.png")
        name = kinds[number % 3]
        rows.append(f"{number}.png,{name.upper() if number == 1 else name},{number % 3},words {number}")
    (tmp_path / "t.csv").write_text("\n".join(["picture,kind,number,said", *rows, ""]))
    trained = tmp_path / "logs" / "tiny"
    shutil.copytree(run, trained, symlinks=True)
    reading = ["--evals.val", "null", "--train-data", "none.tar", "--image-key", "picture", "--caption-key", "said"]
    (trained / "config.yaml").write_text(dump(load(["--config", str(run / "config.yaml"), *reading])))
    data, out = str(tmp_path / "t.csv"), ["--output", str(tmp_path / "out.jsonl")]
    for words in ([data], [data, "--classes-from", "kind"], [f"--evals.other.data.shards={data}"]):
        assert evaluate(trained, *words, *out) == 0
    made = lines(tmp_path / "out.jsonl")
    assert [one["eval"] for one in made] == ["val", "val", "other"] and all(one["n"] == 12 for one in made)
    assert made[1]["settings"]["classes"] == ["Blue thing", "green", "red thing"]
    capsys.readouterr()
    for label, said in (
        ("number", "number has numbers, such as 0"),
        ("nothing", "no sample has a label in 'nothing'"),
        ("json:", "the path '' is malformed"),
    ):
        assert evaluate(trained, data, "--classes-from", label) == 2
        assert f"--classes-from: {said}" in capsys.readouterr().err
    for words, said in (
        ([str(trained.parent / "tinny"), data], "did you mean"),
        (["--classes-from", "kind", "--model", "ViT-B-32"], "--classes-from requires data"),
    ):
        assert main(words) == 2 and said in capsys.readouterr().err


def test_classes_are_taken_from_a_field_of_the_json_member(run: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(8):
            photo(number).save(file := io.BytesIO(), "PNG")
            names = ("Big_cat", "big cat", "dog")  # two spellings of one class
            fields = json.dumps({"kind": names[number % 3]}).encode()
            for suffix, content in (("png", file.getvalue()), ("json", fields)):
                member = tarfile.TarInfo(f"{number}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    out = tmp_path / "out.jsonl"
    assert evaluate(run, str(tmp_path / "a.tar"), "--classes-from", "kind", "--output", str(out)) == 0
    (made,) = lines(out)
    assert made["settings"]["classes"] == ["Big_cat", "dog"] and made["settings"]["label"] == "json:kind"
