"""Zero-shot results equal open_clip's; the runner does not affect training."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from open_clip.zero_shot_classifier import build_zero_shot_classifier

from clipstream.data.decode.class_names import class_names, prompt_templates
from clipstream.data.source_settings import SourceSettings
from clipstream.distributed.world import World
from clipstream.errors import DataError, SettingsError
from clipstream.evals.classes import Labelling
from clipstream.evals.context import DryRun, EvalContext
from clipstream.evals.metrics import accuracies
from clipstream.evals.runner import EvalRunner, Listeners, build_evaluators
from clipstream.evals.settings import EvalSettings, RetrievalSettings, ZeroShotSettings
from clipstream.training.state import seed_all
from tests.support.clipbenchmark import tokenize
from tests.support.evaluating import context_of, evaluated, open_clip_features, tiny_towers
from tests.support.pictures import ByteTokenizer, make_shards
from tests.support.ranks import run_ranks

CLASSES = ["red", "a cat", "green dog", "snow", "x", "tree", "seven"]
TEMPLATES = ["a {c}", "the {} there", "{c} or {c}"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("labelled")
    make_shards(folder, [17, 20, 14])  # class = number modulo 3
    return folder


def settings_of(folder: Path | str, **more: Any) -> ZeroShotSettings:
    data = SourceSettings(shards=f"{folder}/0000{{0..2}}.tar")
    values = {"data": data, "classes": CLASSES, "templates": TEMPLATES, "batch_size": 8, **more}
    return ZeroShotSettings.model_validate(values)


def reference(n: int) -> dict[str, float]:
    """By open_clip's classifier and transform, and the definition of the figures."""
    templates = [lambda c: f"a {c}", lambda c: f"the {c} there", lambda c: f"{c} or {c}"]
    classifier = build_zero_shot_classifier(tiny_towers().eval().clip, tokenize, CLASSES, templates)
    order = (open_clip_features(range(n), ["a"])[0] @ classifier.double()).argsort(dim=1, descending=True).numpy()
    labels = np.arange(n) % 3
    first = order[:, 0] == labels
    return {
        "top1": float(first.mean()),
        "top5": float((order[:, :5] == labels[:, None]).any(axis=1).mean()),
        "mean_per_class_recall": float(np.mean([first[labels == c].mean() for c in range(3)])),
        "n": n,
        "chance": 1 / 7,
    }


def test_equal_to_open_clip(pictures: Path) -> None:
    expected = reference(51)
    assert 0 < expected["top5"] < 1
    assert evaluated(settings_of(pictures)) == pytest.approx(expected, abs=1e-12)


def encoded(world: World, folder: str) -> tuple[list[int], list[dict[str, float]]]:
    """Texts that the tower encoded in each evaluation, and the figures: twice, with other weights, and as before."""
    towers, counts = tiny_towers(7), [0]

    def count(_: Any, given: tuple[torch.Tensor, ...]) -> None:
        counts[-1] += len(given[0])

    handle = towers.clip.ln_final.register_forward_pre_hook(count)
    context = EvalContext(towers, ByteTokenizer(), world)
    runner = EvalRunner({"one": settings_of(folder), "two": settings_of(folder)}, context)
    records, weight = [], towers.clip.token_embedding.weight
    first = weight.detach().clone()
    for numbers in (first, first, first + 1, first):
        with torch.no_grad():
            weight.copy_(numbers)
        counts.append(0)
        records.append({k: v for k, v in runner(1, last=True)[1].items() if k not in ("seconds", "time")})
    handle.remove()
    return counts[1:], records


def test_texts_are_encoded_once_for_the_same_weights(pictures: Path) -> None:
    """Over all ranks, for all evaluators with the same prompts; the weights of before are still known."""
    results = run_ranks(2, encoded, str(pictures))
    prompts = len(CLASSES) * len(TEMPLATES)
    assert [sum(counts[turn] for counts, _ in results) for turn in range(4)] == [prompts, 0, prompts, 0]
    for _, (one, again, _, last) in results:
        assert one == again == last


def test_the_classifiers_that_are_kept_are_few(pictures: Path) -> None:
    context = context_of(World())
    made = []
    for turn in (*range(10), 9, 0):
        context.remember([str(turn)], lambda turn=turn: made.append(turn) or torch.zeros(1))  # type: ignore[misc]
    assert made == [*range(10), 0]


def test_few_classes_and_classes_without_pictures() -> None:
    tally = torch.tensor([[3.0, 4, 4], [0, 2, 2], [0, 0, 0]], dtype=torch.float64)
    assert dict(accuracies(tally)) == pytest.approx(
        {"top1": 0.5, "top5": 1.0, "mean_per_class_recall": 0.375, "n": 6, "chance": 1 / 3}
    )


def test_class_names(tmp_path: Path) -> None:
    assert len(class_names("imagenet")) == 1000
    (tmp_path / "names.txt").write_text("tench\n\n great white shark \nä\n", encoding="utf-8")
    assert class_names(str(tmp_path / "names.txt")) == ["tench", "great white shark", "ä"]


NAMES = ["red", "lime, green", "blue"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((f"{name}.{end}", json.dumps(value, indent=indent)) for end in ("json", "txt") for indent in (None, 2)
          for name, value in [
            ("list", NAMES), ("map", {str(n): name for n, name in enumerate(NAMES)}),
            ("inverse", {name: n for n, name in reversed(list(enumerate(NAMES)))}),
          ]),
        ("lines.txt", "\n".join(NAMES)),
        ("table.csv", "id,name\n" + "".join(f'{n},"{NAMES[n]}"\n' for n in (2, 0, 1))),
        ("one.csv", "name\n" + "".join(f'"{name}"\n' for name in NAMES)),
    ],
)  # fmt: skip
def test_class_names_in_any_form(tmp_path: Path, name: str, text: str) -> None:
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        (tmp_path / name).write_bytes(text.replace("\n", "\r\n").encode(encoding))
        assert class_names(str(tmp_path / name)) == NAMES


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.py", "[\n 'a',\n lambda c: c\n]", "invalid JSON: .*line 2 column 2"),
        ("a.txt", '[\n "a",\n "b"\n', "invalid JSON: .*line"),
        ("a.json", '{"0": "a", "2": "b"}', "not numbered from 0 to 1"),
        ("a.json", '{"a": "b"}', "not numbered from 0"), ("a.json", "[1, 2]", "expected a JSON list"),
        ("a.json", '{"id2label": {"0": "a", "1": "b"}}', "not numbered from 0"),
        ("a.json", '{"0": ["n01440764", "tench"], "1": ["n01443537", "goldfish"]}', "expected a JSON list"),
        ("a.txt", "['a', 'b']", "invalid JSON"), ("a.csv", "x,y\n1,2\n", r"none of its columns \(x, y\)"),
        ("a.csv", "0,cat\n1,dog\n", "none of its columns"), ("a.csv", "id,name\n0,a,b\n", "expected 2 columns"),
        ("a.yaml", "names: [a, b]", "YAML"),
        *(("a.txt", form.format(*of), "the texts alone, in order") for form in ("0 {}\n1 {}\n", "0: '{}',\n1: '{}',")
          for of in [("a", "b"), ("red, dark", "blue")]),
        ("a.txt", "n01440764 tench\nn01443537 goldfish\n", "the texts alone, in order"),
        *(("a.txt", "\n".join(lines), "line 1, .*is code or a comment, or of a table or list with marks")
          for lines in (["'a'", "'b'"], ['"a",', '"b"'], ["a,", "b,"])),
        ("a.txt", "# classes\na\nb\n", "line 1, '# classes', is code or a comment"),
        ("a.py", "names = [\n 'a',\n 'b',\n]\n", r"line 1, 'names = \[', is code"),
        ("a.pbtxt", "item {\n  id: 1\n  name: 'a'\n}\n", "line 1, 'item {', is code"),
        ("a.txt", "a\n'b',\nc\n", """line 2, "'b',", is code"""),
        ("a.txt", "n01440764 0 tench\nn01443537 1 goldfish\n", "the texts alone, in order"),
        *(("a.txt", form.format("a") + "\n" + form.format("b"), "line 1, .* of a table or list with marks")
          for form in ("{}\t0", "- {}", "* {}", "{};")), ("a.txt", "1\ta\n10\tb", "line 1, .* of a table"),
        ("a.txt", "red, green, blue", "expected at least 2, not 1"),
    ],
)  # fmt: skip
def test_other_forms_of_class_names_are_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SettingsError, match=said):
        class_names(str(tmp_path / name))


def test_names_may_begin_with_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 cent\n5 cents\n10 cents\nAvengers: Endgame\n")
    assert class_names(str(tmp_path / "a.txt")) == ["1 cent", "5 cents", "10 cents", "Avengers: Endgame"]


def say(spec: str | list[str]) -> list[str]:
    return [template("cat") for template in prompt_templates(spec)]


def test_templates(tmp_path: Path) -> None:
    assert len(say("openai")) == 80 and "a photo of the small cat." in say("openai")
    assert len(say("simple")) == 7
    assert say("plain") == ["cat"]
    assert say(["a {c}, {c}", "one {}", "<a> [b] 100% {c}"]) == ["a cat, cat", "one cat", "<a> [b] 100% cat"]
    wrong = "{other} {c}", "{} %s", "a {0} {c}", "<class> {}", "a [CLASS] {c}", "lambda c: f'a {c}.'", "{{}}", "a {{c}}"
    for text in wrong:
        with pytest.raises(SettingsError, match=r"only \{c\} and \{\} are replaced by the class name, not"):
            say([text])
    (tmp_path / "t.txt").write_text("my {c}\n\nyour {c}\n")
    assert say(str(tmp_path / "t.txt")) == ["my cat", "your cat"]
    for text in ("{}\n{c} here\n", '["{}", "{c} here"]', "template\n{}\n{c} here\n"):
        name = "t.csv" if text[0] == "t" else "t.txt"
        (tmp_path / name).write_text(text)
        assert say(str(tmp_path / name)) == ["cat", "cat here"]
    with pytest.raises(SettingsError, match="'a cat'"):
        prompt_templates(["a cat"])


def test_classes_without_pictures_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    labelling = Labelling("cls", "one", ["cat", "dog", "eel", "fox"])
    labelling.warn_of_unseen(DryRun.of(context_of(World()), "val"), [3, 0, 0, 0])
    for counts in ([3, 1, 1, 2], [3, 0, 1, 0], [3, 0, 1, 0]):
        labelling.warn_of_unseen(context_of(World()), counts)
    assert [record.message[:88] for record in caplog.records] == [
        "only 2 of 4 class names are labels of the data: no samples of 'dog', 'fox'. Set the eval"
    ]


def test_a_label_outside_the_classes_is_told(pictures: Path) -> None:
    with pytest.raises((DataError, SettingsError), match="cls"):
        evaluated(settings_of(pictures, classes=["a", "b"]))


def test_built_ins_need_data_and_files_are_looked_for_at_once(pictures: Path) -> None:
    with pytest.raises(SettingsError, match=r"evals\.val: .*data\.shards"):
        build_evaluators({"val": RetrievalSettings()})
    with pytest.raises(SettingsError, match=r"evals\.mine: classes: .*none"):
        build_evaluators({"mine": settings_of(pictures, classes="none")})
    with pytest.raises(SettingsError, match=r"evals\.mine: .*no_such_module"):
        build_evaluators({"mine": EvalSettings.model_construct(type="no_such_module:Name", every=0)})


def draws() -> tuple[float, ...]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


class Noisy:
    """A user's evaluator that moves every random state and sets the towers' mode."""

    class Settings(EvalSettings):
        bonus: float = 1.0

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
        assert not tiny_towers().training
        ids = torch.zeros((2, 16), dtype=torch.int32)
        assert not context.encode_text(ids).requires_grad
        draws()
        yield "mine", self.settings.bonus


def test_a_users_evaluator_leaves_training_as_it_was() -> None:
    section = EvalSettings.model_validate({"type": f"{__name__}:Noisy", "every": 2, "bonus": 3})
    towers = tiny_towers()
    records: list[dict[str, Any]] = []
    runner = EvalRunner({"own": section}, context_of(World()), Listeners(records.append))
    towers.train()
    towers.clip.visual.eval()  # as a frozen tower
    seed_all(1, 0)
    expected = draws()
    seed_all(1, 0)
    assert runner(2) == records
    assert draws() == expected
    assert towers.training and towers.clip.transformer.training and not towers.clip.visual.training
    (record,) = records
    assert record["seconds"] >= 0 and record["metrics"] == ["mine", "dropped", "seconds"]
    assert record.items() >= {"step": 2, "eval": "own", "mine": 3.0, "dropped": 0}.items()


def test_when_evaluators_are_due(pictures: Path) -> None:
    source = SourceSettings(shards=f"{pictures}/00000.tar")
    sections = {"often": RetrievalSettings(data=source, every=2), "end": RetrievalSettings(data=source)}
    runner = EvalRunner(sections, context_of(World()))
    assert [runner.due(step) for step in (0, 1, 2, 3)] == [[], [], ["often"], []]
    assert runner.due(3, last=True) == ["often", "end"]


def test_dropped_pictures_are_told_and_errors_name_the_evaluator(tmp_path: Path) -> None:
    make_shards(tmp_path / "good", [4])
    make_shards(tmp_path / "bad", [3], txt=b"\xff\xfe")
    both = {"all": RetrievalSettings(data=SourceSettings(shards=[f"{tmp_path}/{x}/*.tar" for x in ("good", "bad")]))}
    (record,) = EvalRunner(both, context_of(World()))(1, last=True)
    assert (record["n"], record["dropped"]) == (4, 3)
    bad = {"val": RetrievalSettings(data=SourceSettings(shards=f"{tmp_path}/bad/*.tar"), on_error="raise")}
    with pytest.raises(DataError, match=r"^evals\.val: "):
        EvalRunner(bad, context_of(World()))(1, last=True)


def test_pictures_are_shown_with_their_best_classes(pictures: Path) -> None:
    context = context_of(World(), examples=8)
    got: list[Any] = []
    runner = EvalRunner({"z": settings_of(pictures)}, context, Listeners(got.append, lambda *shown: got.append(shown)))
    runner(7, last=True)
    (step, name, examples, tables), record = got
    (table,) = tables
    right = sum(int(told.partition(" of ")[0]) for _, told, _ in table.rows)
    seen = sum(int(told.partition(" of ")[2]) for _, told, _ in table.rows)
    assert (right, seen) == (round(record["top1"] * record["n"]), record["n"]), "no class is all right here"
    assert (step, name, record["eval"]) == (7, "z", "z")
    assert 0 < len(examples) <= 8 and all(e.pixels.shape == (3, 16, 16) for e in examples)
    for example in examples:
        assert example.text in CLASSES and len(example.guesses) == 3
        assert (example.guesses[0][0] == example.text) == (example.group == "right")
