"""Settings: sources, places of errors, short flags, rules across sections, resolving and writing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from clipstream.config.config_file import dump, portable
from clipstream.config.plan import agree, survey
from clipstream.config.settings import Settings, load, read
from clipstream.config.validate import validate_evals, validate_run
from clipstream.config.value_tree import NULLS
from clipstream.data.source_settings import JsonCaption
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.losses.settings import ClipLossSettings, SiglipLossSettings
from clipstream.utils.section import leaves
from tests.support.settings_files import OWN, OwnCaption, at, planned, problems, write

BASE = ["--train-data", "a.tar", "--steps", "10", "--name", "x"]


def test_later_sources_win(tmp_path: Path) -> None:
    one = write(tmp_path / "1.yaml", "optim: {lr: 1e-3, wd: 0.1}\ntrain: {steps: 5}\nschedule: {warmup: 1}")
    two = write(tmp_path / "2.yaml", "optim:\n  lr: 2e-3\nschedule:\n")
    settings = load(["--config", one, "--optim.wd=0.3", "--config", two])
    assert (settings.optim.lr, settings.optim.wd) == (2e-3, 0.3)
    assert (settings.schedule.warmup, settings.train.steps) == (1, 5)
    again = load(["--config", one, "--epochs", "2.5", "--train-num-samples", "1000", "--batch-size", "8"])
    assert (again.train.steps, again.total_steps) == (None, 313), "another length displaces the old one"


def test_environment_is_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", '{"name": "RN50"}')
    monkeypatch.setenv("RUN__SEED", "3")
    assert load([]) == Settings() == load(["--config", "/dev/null"])


def test_text_in_yaml_stays_text(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.yaml",
        "run: {name: 00001, logs: 2020-02-31}\n"
        "evals: {e: {type: zero_shot, classes: [yes, no, 1, null], data: {shards: 2024-01-01}}}",
    )
    settings = load(["--config", file])
    assert (settings.run.name, settings.run.logs) == ("00001", "2020-02-31")  # of which one is no date
    assert at(settings, "evals.e.classes") == ["yes", "no", "1", "null"]
    assert at(settings, "evals.e.data.shards") == "2024-01-01"


@examples(max_examples=50, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1))
def test_any_text_is_itself(text: str) -> None:
    assert load([f"--evals.a.fetch={text}"]).evals["a"].fetch == (None if text in NULLS else text)


def test_another_type_starts_afresh(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.yaml",
        "loss: {type: clip, max_logit_scale: 50}\n"
        "data: {sources: {train: {shards: a.tar, caption: {key: cap}}}}\n"
        "evals: {v: {max_samples: 5, every: 7, data: {shards: v.tar}}, w: {data: {shards: w.tar}}}",
    )
    assert load(["--config", file]).loss == ClipLossSettings(max_logit_scale=50)
    flags = "--loss.type=siglip --caption-json=a.b --evals.w=null --evals.v.type=zero_shot --evals.v.classes=imagenet"
    settings = load(["--config", file, *flags.split()])
    assert settings.loss == SiglipLossSettings()
    assert settings.data.sources["train"].caption == JsonCaption(path="a.b")
    assert list(settings.evals) == ["v"]
    assert (at(settings, "evals.v.every"), at(settings, "evals.v.data.shards")) == (7, "v.tar")


def test_own_parts_bring_their_settings(tmp_path: Path) -> None:
    text = f"data: {{sources: {{train: {{shards: a, caption: {{type: '{OWN}', depth: 3}}}}}}}}"
    file = write(tmp_path / "a.yaml", text)
    settings = load(["--config", file, "--data.sources.train.caption.loud"])
    assert settings.data.sources["train"].caption == OwnCaption.Settings(type=OWN, depth=3, loud=True)
    assert load(["--config", write(tmp_path / "b.yaml", dump(settings))]) == portable(settings)
    assert "did you mean 'depth'" in problems(["--config", file, "--data.sources.train.caption.dept=3"])[0]
    flag = "--data.sources.train.caption.depth"
    assert problems(["--config", file, flag]) == [f"{flag}: requires a value"]


def test_every_error_at_once_with_its_place(tmp_path: Path) -> None:
    file = write(
        tmp_path / "my.yaml",
        "data:\n  sampling:\n    mode: epochs\n  workerz: 3\n  sources:\n    a:\n      weight: 0\n"
        "      caption: {type: jsn}\noptim:\n  lr: fast\ntrian: {}\nevals:\n  z: {type: zero_shot, every: -1}\n",
    )
    found = problems(["--config", file, "--precision", "fp46", "--bathsize", "3", "--lr", "--data.shufle.window", "3"])
    wanted = [
        f"{file}:3: data.sampling.mode: 'epochs' is not one of resampled, epoch, indexed; did you mean 'epoch'?",
        f"{file}:4: data.workerz: unknown key; did you mean 'workers'?",
        f"{file}:6: data.sources.a.shards: missing: required",
        f"{file}:7: data.sources.a.weight: expected a number above 0, not 0",
        f"{file}:8: data.sources.a.caption.type: type 'jsn' is not one of json, label, text, nor a "
        "'package.module:Name'; did you mean 'json'?",
        f"{file}:10: optim.lr: expected a number, not 'fast'",
        f"{file}:11: trian: unknown key; did you mean 'train'?",
        f"{file}:13: evals.z.every: expected at least 0, not -1",
        "--precision: train.precision: 'fp46' is not one of auto, fp32, bf16, fp16, pure_bf16, fp64; "
        "did you mean 'fp16'?",
        "--bathsize: unknown flag; did you mean '--batch-size'?",
        "--lr: requires a value",
        "--data.shufle.window: data.shufle: unknown key; did you mean 'shuffle'?",
    ]
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2", ":2: not YAML: "),
        ("run:\n  seed: 1\n  name: x\n  seed: 2", ":4: duplicate key 'seed' (first at "),
        ("- a\n- b", ":1: expected a mapping of sections, not "),
        ("run: 3", ":1: run: expected a mapping of keys, not 3"),
        ("run: {seed: {a: 1}}", ":1: run.seed: expected a whole number, not {'a': 1}"),
        ("run: !!python/object:os.system {}", ":1: "),
        ("data: {sources: [a]}", ":1: data.sources: expected a mapping of names"),
        ("global_batch_size: 3", ":1: global_batch_size: unknown key; did you mean 'data.global_batch_size'"),
        ("run: &a\n  logs: *a", "an alias contains itself"),
        ("run: &a\n  <<: *a", "nested too deeply, or an alias contains itself"),
        ("run: " + "[" * 2000, "too deep"),
        ("run: {}\n? [a]\n: 3", ":2: a key must be a scalar, not a list or a mapping"),
        ("run: {<<: [3]}", ":1: << takes only mappings"),
        ("run:\n  seed: 2020-02-31", ":2: run.seed: expected a whole number, not '2020-02-31'"),
        ("run: {seed: " + "9" * 5000 + "}", ":1: run.seed: expected a smaller number"),
        ("run: {}\nmodel: \0", ":2: not YAML: the character #x0000 is not allowed"),
        ('run: {logs: "a\\0b"}', ":1: run.logs: no path has a null character"),
        (
            "evals: {o: {data: &a {shards: a}}, e: {data: {<<: *a, weight: -1}}}",
            "evals.e.data.weight: expected a number",
        ),
    ],
    ids=lambda value: value[:20],
)
def test_files_that_no_settings_have(tmp_path: Path, text: str, message: str) -> None:
    found = problems(["--config", write(tmp_path / "a.yaml", text)])[0]
    assert message in found and len(found) < 400


def test_a_missing_key_is_named_and_no_flag_of_another(tmp_path: Path) -> None:
    """Nor the file's line of another evaluator; a mapping that a file or a flag sets as a whole is named."""
    other = ["--config", write(tmp_path / "a.yaml", "evals:\n  other: {data: {shards: a}}\n")]
    whole = write(tmp_path / "b.yaml", "evals:\n  a: {type: zero_shot, data: {shards: a}}\n")
    flags = ["--evals.a.batch-size", "8", "--evals.a.type", "zero_shot", "--evals.a.data.shards", "a"]
    for argv, place in (
        ([*other, *flags], ""),
        (["--config", whole, *flags[:2]], f"{whole}:2: "),
        (["--evals.a={type: zero_shot, batch_size: 8, data: {shards: a}}"], "--evals.a: "),
    ):
        with pytest.raises(SettingsError) as caught:
            validate_evals(read(argv, trains=False), shown=True)
        assert str(caught.value).startswith(f"{place}evals.a.classes: missing: ")


def test_classes_given_twice_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "names.txt", "dog\ncat\n\x1b[31mDog\n cat \n")
    zero_shot = ["--evals.a.type=zero_shot", "--evals.a.data.shards=a"]
    train = [*BASE, "--name=x", *zero_shot]
    for classes in (f"--evals.a.classes={file}", "--evals.a.classes=[cat, dog, Cat]"):
        validate_evals(read([*zero_shot, classes], trains=False), shown=True)
        told = capsys.readouterr().err
        assert told.startswith("warning: --evals.a.classes: duplicate class names: 'cat'") and told.count("\n") == 1
        validate_run(read([*train, classes]), World())
        assert capsys.readouterr().err == told
        validate_run(read([*train, classes]), World(size=2, rank=1))
    for classes in ("--evals.a.classes=[cat, dog]", "--evals.a.classes=imagenet"):
        validate_evals(read([*zero_shot, classes], trains=False), shown=True)
    assert capsys.readouterr().err == "", "told on rank 0 alone, and of the user's own names alone"


def test_an_existing_run_is_not_written_over(tmp_path: Path) -> None:
    argv = [*BASE, "--logs", str(tmp_path)]
    (tmp_path / "x").mkdir()
    validate_run(read(argv), World())
    (tmp_path / "x" / "config.yaml").touch()
    with pytest.raises(SettingsError, match=r"--resume auto, or .* --name"):
        validate_run(read(argv), World(rank=1, size=2))
    validate_run(read([*argv, "--resume", "auto"]), World())


@pytest.mark.parametrize(
    ("model", "name"),
    [("ViT-B-32", "ViT-B-32"), ("my/small.json", "small"), ("hf-hub:org/A-b", "org-A-b"), ("local-dir:/a/b", "a-b")],
)
def test_dated_names(tmp_path: Path, model: str, name: str) -> None:
    settings = load(["--model", model, "--logs", str(tmp_path)])
    first = agree(survey(settings), World()).settings.run_folder
    assert re.fullmatch(rf"\d{{4}}_\d\d_\d\d-\d\d_\d\d_\d\d-model_{name}-b_512", first.name)
    first.mkdir()
    assert agree(survey(settings), World()).settings.run_folder != first


def test_the_written_file_repeats_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    flags = (
        "--train-data=https://${TOKEN}@h/{0..3}.tar --val-data=v.tar --caption-json=a.b;c --lr=1e-5 --name=1e-3 "
        "--batch-size=8 --accum-freq=2 --epochs=1.5 --train-num-samples=100 --loss.type=siglip "
        "--optim.betas=[0.9,0.95] --tokenizer=hf-hub:o/n --resume=auto"
    )
    settings = load(flags.split(), ranks=2)
    resolved = planned(settings, 2)
    text = dump(resolved)
    assert "secret" not in text
    assert "${TOKEN}" in text
    again = load(["--config", write(tmp_path / "config.yaml", text)], ranks=7)
    assert again.checkpoint.resume is None
    checkpoint = again.checkpoint.model_copy(update={"resume": "auto"})
    assert again.model_copy(update={"checkpoint": checkpoint}) == portable(resolved)
    assert dump(again) == text
    assert (again.data.lanes, again.total_steps) == (32, 5)


def test_each_new_setting_is_a_decision() -> None:
    """A key is added to the list, and removed from it, by hand: a constant does for what nobody would set.

    A section that stands in two places, as a source of training and one of an evaluator, has its keys once.
    """
    sections = yaml.safe_load(Path(__file__).with_name("settings.yaml").read_text(encoding="utf-8"))
    known = [f"{section}.{key}" for section, keys in sections.items() for key in keys.split()]
    keys: dict[int, str] = {}
    for key, field in leaves(Settings):
        keys.setdefault(id(field), key)
    assert sorted(keys.values()) == sorted(known)
    assert len(known) <= 230


def test_models_of_the_package_are_named_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").mkdir()  # a folder that is no model
    for name in ("small", "small-vit", "lite0-minilm"):
        by_name, by_path = (read(["--model", one]) for one in (name, f"configs/models/{name}.json"))
        assert by_name.settings == by_path.settings and Path(by_name.settings.model.name).is_file()
        assert [name in notice for notice in by_path.places.notices] == [True] and not by_name.places.notices
    assert load(["--model", "ViT-B-32"]).model.name == "ViT-B-32"
