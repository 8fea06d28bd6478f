"""Suites of evaluators: the files in configs/evals, the folder of data sets, missing sets, and means."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from clipstream.cli.verbs.evaluate import main
from clipstream.config.config_file import dump
from clipstream.config.settings import Settings, load, read
from clipstream.config.validate import validate_run
from clipstream.distributed.world import World
from clipstream.errors import DataError, SettingsError
from clipstream.evals.context import EvalContext
from clipstream.evals.evaluators.mean import Mean
from clipstream.evals.runner import EvalRunner
from clipstream.evals.settings import ROOT as VARIABLE
from clipstream.evals.settings import EvalSettings
from clipstream.training.state import TrainState
from tests.support.clipbenchmark import CLASSES, drawn, write_benchmark
from tests.support.evaluating import CONFIG, context_of, tiny_towers
from tests.support.forks import ROOT
from tests.support.savers import saver_of

SUITES = sorted((ROOT / "configs/evals").glob("*.yaml"))
ROBUSTNESS, RETRIEVAL = (str(ROOT / f"configs/evals/{name}.yaml") for name in ("robustness", "retrieval"))
SHIFTS = ("imagenetv2", "imagenet_a", "imagenet_r", "imagenet_sketch", "objectnet")
FLAGS = "--device cpu --workers 0 --run.threads 1 --precision fp32 --model.allow-mismatch"
FLAGS += " --tokenizer tests.tools.test_evaluate:Bytes"


@pytest.fixture
def sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of both suites' sets, of few pictures each."""
    monkeypatch.setenv(VARIABLE, "unset")
    monkeypatch.delenv(VARIABLE)
    for number, shards in enumerate(shards_of(ROBUSTNESS)):
        write_benchmark(tmp_path / "sets" / shards, drawn(8 + number), shards=2)
    for shards in shards_of(RETRIEVAL):
        pairs = [(picture, [CLASSES[label], f"a {i}"]) for i, (picture, label) in enumerate(drawn(12))]
        write_benchmark(tmp_path / "sets" / shards, pairs, kind="retrieval", shards=2)
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG))
    yield tmp_path / "sets"


def shards_of(suite: str) -> list[str]:
    sections = load(["--config", suite], trains=False).evals.values()
    return [str(section.data.shards).rpartition("/")[2] for section in sections if section.data is not None]


def evaluate(folder: Path, *words: str) -> int:
    model = ["--model", str(folder / "tiny.json"), "--output", str(folder / "out.jsonl")]
    return main([*model, *FLAGS.split(), *words])


def records(folder: Path) -> dict[str, dict[str, Any]]:
    lines = (folder / "out.jsonl").read_text().splitlines()
    return {record["eval"]: record for record in map(json.loads, lines)}


@pytest.mark.parametrize("suite", SUITES, ids=lambda path: path.stem)
def test_a_suite_names_each_set_its_folder_and_how_it_is_fetched(suite: Path) -> None:
    sections = load(["--config", str(suite)], trains=False).evals
    both = tuple(f"{mean}{way}_R@1" for mean in ("", "mean_") for way in ("image_to_text", "text_to_image"))
    metrics: dict[str, tuple[str, ...]] = {
        "zero_shot": ("top1", "mean_per_class_recall"),
        "retrieval": both,
        "choice": ("accuracy",),
    }
    for section in sections.values():
        if isinstance(section, Mean.Settings):
            for name, told in section.of.items():
                assert set([told] if isinstance(told, str) else told) <= set(metrics[sections[name].type]), name
            continue
        assert section.data is not None and section.download is not None
        if suite.stem == "languages":  # whose commands tests/evals/test_languages.py runs
            assert "${CLIPSTREAM_EVALS}/" in str(section.data.shards) and "${CLIPSTREAM_EVALS}/" in section.download
            continue
        kind, of_kind = ("", r"/data/\*\.parquet") if section.type == "choice" else ("benchmark:", "")
        found = re.fullmatch(rf"{kind}\$\{{CLIPSTREAM_EVALS\}}/([\w-]+){of_kind}", str(section.data.shards))
        assert found is not None
        org = "clip-benchmark" if section.fetch is None else section.fetch.partition("/")[0]
        assert shlex.split(section.download) == [
            *("hf", "download", f"{org}/{found[1]}", "--repo-type", "dataset", "--exclude", "train/*"),
            *("--local-dir", f"${{CLIPSTREAM_EVALS}}/{found[1]}"),
        ]
    head = suite.read_text().partition("evals:")[0]
    assert re.search(rf"^#   clipstream evaluate .*--suite configs/evals/{suite.name}$", head, re.M)
    assert (
        len(sections)
        == {"datacomp": 32 + 3, "robustness": 6 + 1, "retrieval": 2 + 1, "languages": 4 + 1, "composition": 9 + 2}[
            suite.stem
        ]
    )


def test_a_model_on_two_suites(sets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = sets.parent
    assert evaluate(folder, "--suite", ROBUSTNESS, f"--suite={RETRIEVAL}", "--evals-root", str(sets)) == 0
    found = records(folder)
    assert [found[name]["n"] for name in ("imagenet1k", *SHIFTS)] == [8, 9, 10, 11, 12, 13]
    assert found["robustness"]["mean"] == pytest.approx(sum(found[name]["top1"] for name in SHIFTS) / 5)
    both = [found[name][f"{way}_R@1"] for name in ("mscoco", "flickr30k") for way in ("image_to_text", "text_to_image")]
    assert found["retrieval"]["mean"] == pytest.approx(sum(both) / 4)
    assert (found["robustness"]["sets"], found["retrieval"]["sets"], found["mscoco"]["captions"]) == (5, 2, 24)
    assert str(sets) not in json.dumps(found["objectnet"]["settings"])  # figures of two machines compare
    assert re.search(r"robustness +mean +\d", capsys.readouterr().out)


def test_prompts_of_a_suite_want_a_page(sets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = sets.parent / "mine.yaml"
    suite.write_text(f"evals:\n  a:\n    data: {{shards: 'benchmark:{sets}/wds_flickr30k'}}\n    prompts: [a cat]\n")
    assert evaluate(sets.parent, "--suite", str(suite)) == 2
    assert f"{suite}:4: evals.a.prompts requires --report" in capsys.readouterr().err
    assert evaluate(sets.parent, "--suite", str(suite), "--html", str(sets.parent / "page.html")) == 0
    assert "“a cat”" in (sets.parent / "page.html").read_text()


def test_what_is_missing_is_told_at_once_with_the_way_to_get_it(sets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(sets / "wds_objectnet")
    (sets / "wds_imagenet-r/test/1.tar").unlink()
    (sets / "wds_imagenetv2/test/nshards.txt").unlink()
    asked = ["--suite", ROBUSTNESS, "--evals-root", str(sets)]
    assert main(["--model", "no-such-model", *asked]) == 2  # looked for before any model
    told = capsys.readouterr().err
    assert "3 of 6 data sets are missing" in told and told.count("hf download") == 3
    assert f"objectnet: {sets}/wds_objectnet does not exist\n    hf download clip-benchmark/wds_objectnet " in told
    assert f"--local-dir '{sets}/wds_objectnet'" in told
    assert f"1 of 2 shards do not exist: {sets}/wds_imagenet-r/test/1.tar" in told and "nshards.txt is not" in told
    assert evaluate(sets.parent, *asked, "--missing", "skip") == 0
    found = records(sets.parent)
    left = ("imagenet_a", "imagenet_sketch")
    assert found.keys() == {"imagenet1k", *left, "robustness"} and found["robustness"]["sets"] == 2
    assert found["robustness"]["mean"] == pytest.approx(sum(found[name]["top1"] for name in left) / 2)
    assert "warning: robustness is the mean of 2 of 5 sets" in capsys.readouterr().err


def test_class_names_of_languages_are_files_of_a_data_set(sets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    languages = str(ROOT / "configs/evals/languages.yaml")
    write_benchmark(sets / "wds_imagenet1k", drawn(8), shards=2)
    assert main(["--model", "no-such-model", "--suite", languages, "--evals-root", str(sets)]) == 2
    told = capsys.readouterr().err
    assert "4 of 4 data sets are missing" in told and f"mkdir -p '{sets}/xm3600/images' && cd" in told
    assert re.search(r"babel_imagenet: .*babel/classes/AF.json", told), told


def test_sets_of_any_source_type_are_looked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Folders of images, a plug-in whose names are no paths, and sets that are made when they are read."""
    (tmp_path / "images" / "cat").mkdir(parents=True)
    (tmp_path / "images" / "cat" / "1.jpg").write_bytes(b"")
    sections = [
        {"type": "folder", "shards": str(tmp_path / "images")},
        {"type": "tests.data.sources.test_registry:Letters", "shards": ["no/path"]},
        {"shards": "toy:val"},
    ]
    evals = {f"e{number}": {"type": "retrieval", "data": data} for number, data in enumerate(sections)}
    (tmp_path / "own.yaml").write_text(json.dumps({"evals": evals}))
    suite = ["--suite", str(tmp_path / "own.yaml"), "--print-config"]
    assert main(suite) == 0
    shutil.rmtree(tmp_path / "images")
    assert main(suite) == 2
    told = capsys.readouterr().err
    assert "1 of 3 data sets are missing" in told and f"the folder {tmp_path}/images does not exist" in told


def test_what_is_asked_wrong_is_told(sets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in (
        (["--suite", ROBUSTNESS], "set --evals-root FOLDER, or CLIPSTREAM_EVALS"),
        (["--suite", ROBUSTNESS, "--missing", "ignore"], "'ignore' is not one of error, skip"),
        (["--evals-root", str(sets)], "--evals-root: requires --suite FILE"),
        (["--suite", "robustness"], "set --evals-root FOLDER, or CLIPSTREAM_EVALS"),
        (["--suite", "languages", "--evals-root", f"{sets}/no"], "4 of 4 data sets are missing"),
        (["--suite", str(sets / "no.yaml")], f"robustness; {sets / 'no.yaml'} does not exist"),
        (["--suite", "robust"], "error: --suite: expected a file, or one of composition, datacomp, "),
        (["--suite", ROBUSTNESS, "--evals-root", f"{sets}/no", "--missing", "skip"], "no evaluation data"),
    ):
        assert evaluate(sets.parent, *words) == 2 and text in capsys.readouterr().err


def test_of_a_run_only_what_is_asked_for(sets: Path) -> None:
    """Its own evaluators are left out, but for those that the command line names."""
    run, towers = sets.parent / "run", tiny_towers()
    saver = saver_of(run / "checkpoints", model=(towers, torch.optim.AdamW(towers.parameters())))
    saver.save(TrainState(7))
    assert saver.finish()
    pairs = {"type": "retrieval", "data": {"shards": f"benchmark:{sets}/wds_flickr30k"}}
    (run / "config.yaml").write_text(dump(Settings.model_validate({"evals": {"val": pairs, "more": pairs}})))
    asked = [*FLAGS.split(), "--suite", RETRIEVAL, "--evals-root", str(sets), "--evals.val.max-samples", "5"]
    assert main(["--checkpoint", str(run), *asked]) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["eval"] for line in lines] == ["val", "mscoco", "flickr30k", "retrieval"]
    assert lines[0]["n"] == 5 and {line["step"] for line in lines} == {7}


def test_a_run_takes_a_suite_as_settings(sets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is told before it starts what is missing of it."""
    monkeypatch.setenv(VARIABLE, str(sets))
    flags = ["--config", RETRIEVAL, "--train-data", f"benchmark:{sets}/wds_flickr30k", "--steps", "1", "--model", "x"]
    written = read([*flags, "--evals.mscoco.captions", "all"])
    settings = validate_run(written, World()).settings
    runner = EvalRunner(settings.evals, context_of(World()))
    assert runner.dry_run()["retrieval"] == ["mean", "sets"], "a mean is tried like what it is of"
    with pytest.raises(SettingsError, match=r"objectnet.*does not exist.*fetch it: hf download clip-ben"):
        shutil.rmtree(sets / "wds_objectnet")
        validate_run(read([*flags, "--config", ROBUSTNESS]), World())


class Given:
    """A user's own evaluator, that gives a number or fails."""

    class Settings(EvalSettings):
        value: float

    def __init__(self, settings: Settings) -> None:
        self.value = settings.value

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
        if self.value < 0:
            raise DataError("broken")
        yield "score", self.value
        yield "other", 1.0


def given(**values: float) -> dict[str, Any]:
    return {name: {"type": "tests.tools.test_evaluate_suites:Given", "value": value} for name, value in values.items()}


def runner_of(sections: dict[str, Any]) -> EvalRunner:
    settings = {name: EvalSettings.model_validate(section) for name, section in sections.items()}
    return EvalRunner(settings, context_of(World()))


def test_a_mean_comes_last_and_stands_for_all_of_its_sets(capsys: pytest.CaptureFixture[str]) -> None:
    of = {"a": "score", "b": ["score", "other"]}
    runner = runner_of({"all": {"type": "mean", "of": of, "every": 2}, **given(a=0.25, b=0.5)})
    assert runner.dry_run() == {}  # users' own are not tried
    assert [record["eval"] for record in runner(4, last=True)] == ["a", "b", "all"]
    assert runner(4, last=True)[-1]["mean"] == (0.25 + 0.75) / 2
    assert "a has no metrics at this step" in runner(2)[0]["error"]  # neither is due
    failing = runner_of({**given(a=0.25, b=-1), "all": {"type": "mean", "of": of}})(4, last=True)
    assert failing[0]["score"] == 0.25 and "broken" in failing[1]["error"] and "b has no metrics" in failing[2]["error"]
    (_, wrong) = runner_of({**given(a=1), "all": {"type": "mean", "of": {"a": "scores"}}})(4, last=True)
    assert wrong["error"] == "evals.all: of: a has no metric 'scores'; choose from score, other; did you mean 'score'?"
    with pytest.raises(SettingsError, match=r"evals\.all\.of: unknown evaluator 'aa'"):
        runner_of({**given(a=1), "all": {"type": "mean", "of": {"aa": "score"}}})
    with pytest.raises(ValueError, match="set at least one evaluator and its metric"):
        runner_of({"all": {"type": "mean", "of": {}}})
