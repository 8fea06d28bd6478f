"""Images that evaluations show: matches of prompts and confused classes, from the data of all ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from clipstream.data.source_settings import SourceSettings
from clipstream.distributed.world import World
from clipstream.evals.examples import MATCHES, WORST, show_confusions
from clipstream.evals.runner import EvalRunner, Listeners
from clipstream.evals.settings import EvalSettings, RetrievalSettings, ZeroShotSettings
from tests.support.evaluating import context_of
from tests.support.pictures import make_shards
from tests.support.ranks import run_ranks

PROMPTS = ["picture 3", "something else", "picture 3"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("looks")
    make_shards(folder, [9, 2, 12])
    return folder


def sections(pairs: Path) -> dict[str, EvalSettings]:
    data = SourceSettings(shards=f"{pairs}/*.tar")
    labelled: dict[str, Any] = {"data": data, "classes": ["ant", "bee", "cat"], "templates": "plain"}
    return {
        "val": RetrievalSettings(data=data, prompts=PROMPTS, batch_size=5),
        "kinds": ZeroShotSettings(**labelled, prompts=PROMPTS[:2], batch_size=5),
    }


def shown(world: World, pairs: str) -> dict[str, Any]:
    """Evaluation -> what is shown for prompts, (group, key, text, note, pixels' sum); and its tables."""
    found: dict[str, Any] = {}

    def take(step: int, name: str, examples: Any, tables: Any) -> None:
        prompted = [(e.group, e.key, e.text, e.note, int(e.pixels.sum())) for e in examples if e.group.startswith("“")]
        others = Counter(e.group for e in examples if not e.group.startswith("“"))
        found[name] = prompted, [table.rows for table in tables], others

    EvalRunner(sections(Path(pairs)), context_of(world, examples=4), Listeners(show=take))(1, last=True)
    return found


def by_key(prompted: list[tuple[Any, ...]], tables: Any, others: Counter[str]) -> Any:
    """What is shown without scores and their order: the last digits of scores depend on the size of a batch. Of the
    others, one to all best answers are right, by the images of rank 0 and the processor.
    """
    others = Counter({group: min(count, 1) if group == "best" else count for group, count in others.items()})
    return sorted((group, key, text, pixels) for group, key, text, _, pixels in prompted), tables, others


def test_prompts_find_the_same_pictures_on_any_number_of_ranks(pairs: Path) -> None:
    alone = shown(World(), str(pairs))
    one, other = run_ranks(2, shown, str(pairs))
    assert {name: by_key(*what) for name, what in one.items()} == {name: by_key(*what) for name, what in alone.items()}
    assert other == {}
    prompted, tables, others = alone["val"]
    assert [group for group, *_ in prompted] == [f"“{prompt}”" for prompt in PROMPTS for _ in range(MATCHES)]
    assert others["worst"] == 2 and others["best"] in (1, 2) and tables == [], "the others keep their places"
    assert prompted[:MATCHES] == prompted[2 * MATCHES :]
    context, every = context_of(World()), []
    for batch in context.batches(SourceSettings(shards=f"{pairs}/*.tar"), 50):
        assert batch.pixels is not None
        scores = context.encode_prompts(PROMPTS[:1]) @ context.encode_image(batch.pixels).T
        every += list(zip(scores[0].tolist(), batch.keys, batch.pixels.flatten(1).sum(dim=1).tolist(), strict=True))
    best = sorted(every, reverse=True)[:MATCHES]
    for (score, key, pixels), (_, shown_key, text, note, shown_pixels) in zip(best, prompted, strict=False):
        assert (shown_key, shown_pixels) == (key, pixels) and note == f"match {score:.3f}"
        assert text == f"picture {int(key.rpartition('/')[2])}"
    assert {text for _, _, text, _, _ in alone["kinds"][0]} <= {"ant", "bee", "cat"}
    assert sum(int(right.partition(" of ")[2]) for _, right, _ in alone["kinds"][1][0]) <= 23


def confused(world: World) -> list[tuple[tuple[str, ...], ...]]:
    """Of the pictures (class, guess), dealt to the ranks by turns."""
    pairs = [(0, 0)] * 4 + [(1, 0)] * 3 + [(1, 2)] * 2 + [(1, 1)] + [(2, 2), (2, 0)] + [(4, 4)]
    mine = torch.tensor(pairs[world.rank :: world.size])
    context = context_of(world, examples=4)
    show_confusions(context, [mine[:2, 0], mine[2:, 0]], [mine[:, 1]], ["ant", "bee", "cat", "dog", "elk"])
    return [table.rows for table in context.tables]


def test_confused_classes_are_counted_over_all_ranks() -> None:
    assert run_ranks(3, confused)[0] == [(("bee", "1 of 6", "ant (3), cat (2)"), ("cat", "1 of 2", "ant (1)"))]


def test_nothing_is_confused_and_few_are_shown() -> None:
    context, right = context_of(World(), examples=4), torch.arange(3)
    show_confusions(context, [right], [right], ["a", "b", "c"])
    assert context.tables == []
    many = torch.arange(40)
    show_confusions(context, [many], [(many + 1) % 40], [f"class {i}" for i in range(40)])
    assert len(context.tables[0].rows) == WORST
    nothing = context_of(World())
    show_confusions(nothing, [many], [many * 0], [f"class {i}" for i in range(40)])
    assert nothing.tables == []
