"""Retrieval equals open_clip's on 1, 2 and 3 ranks; its tie rule; what it shows."""

from __future__ import annotations

import io
import itertools
import math
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from open_clip_train.train import get_clip_metrics
from PIL import Image

from clipstream.data.decode.tokenizers import CUT
from clipstream.data.source_settings import SourceSettings, TextCaption
from clipstream.distributed.world import World
from clipstream.errors import DataError
from clipstream.evals import metrics
from clipstream.evals.metrics import TIE, EqualCaptions, Ranks, place_pairs
from clipstream.evals.retrieval_and_loss import recalls
from clipstream.evals.settings import RetrievalSettings
from tests.support.evaluating import context_of, evaluated, open_clip_features
from tests.support.pictures import make_shards, picture
from tests.support.ranks import run_ranks
from tests.support.tars import write_tar

CAPTION = TextCaption(key="txt")


def features(n: int, noise: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    images = torch.nn.functional.normalize(torch.randn(n, 8, generator=draw), dim=1)
    texts = torch.nn.functional.normalize(images + noise * torch.randn(n, 8, generator=draw), dim=1)
    return images, texts


def part(world: World, rows: torch.Tensor) -> torch.Tensor:
    cuts = [0, *(len(rows) * (rank + 1) ** 2 // world.size**2 for rank in range(world.size))]  # uneven on purpose
    return rows[cuts[world.rank] : cuts[world.rank + 1]]


def recalls_of_part(world: World, images: torch.Tensor, texts: torch.Tensor) -> dict[str, float]:
    return dict(recalls(part(world, images), part(world, texts), world))


@pytest.mark.parametrize(("n", "noise", "size"), [(64, 9.0, 1), (201, 0.5, 3)])
def test_figures_are_those_of_open_clips_trainer(n: int, noise: float, size: int) -> None:
    images, texts = features(n, noise)
    theirs = get_clip_metrics(images, texts, torch.tensor(8.0))
    for ours in run_ranks(size, recalls_of_part, images, texts):
        for key in (key for key in theirs if "mean_rank" not in key):
            middle = ours[key] if "R@" in key else np.floor(ours[key])  # of an even number it is the mean of two ranks
            assert middle == pytest.approx(theirs[key], abs=1e-12), key
        assert len(ours.keys() & theirs.keys()) == 8 and ours["n"] == n and ours["chance_R@1"] == 1 / n


def test_ties_have_the_mean_of_open_clips_figures_over_all_orders() -> None:
    images = torch.eye(5)  # whose products are exact
    texts = images[[0, 1, 2, 2, 2]]
    orders = [list(order) for order in itertools.permutations(range(5))]
    theirs = [get_clip_metrics(images[order], texts[order], torch.tensor(8.0)) for order in orders]
    ours = dict(recalls(images, texts, World()))
    for key in (f"{way}_R@{k}" for way in ("image_to_text", "text_to_image") for k in (1, 5)):
        assert ours[key] == pytest.approx(np.mean([figures[key] for figures in theirs])), key
    assert 0.4 < ours["image_to_text_R@1"] < 0.6


def captioned(n: int, m: int, width: int, noise: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """n pictures with m captions, one each at least, some of them level."""
    draw = torch.Generator().manual_seed(3)
    images = torch.nn.functional.normalize(torch.randn(n, width, generator=draw), dim=1)
    owners = torch.cat([torch.arange(n), torch.randint(0, n, (m - n,), generator=draw)])
    texts = images[owners] + noise * torch.randn(m, width, generator=draw)
    texts[m // 2 : m // 2 + 9] = texts[m // 3]
    return images, torch.nn.functional.normalize(texts, dim=1), owners


def dense_places(images: torch.Tensor, texts: torch.Tensor, owners: torch.Tensor) -> tuple[Ranks, Ranks]:
    """By the whole matrix in float64."""
    scores = texts.double() @ images.double().T
    own = scores[torch.arange(len(texts)), owners]
    mine = owners[:, None] == torch.arange(len(images))
    best = scores.masked_fill(~mine, -9).amax(dim=0)
    found = []
    for gap, dim in ((scores - best, 0), (scores - own[:, None], 1)):
        level = gap.abs() <= TIE
        found.append(Ranks((gap > TIE).sum(dim=dim), level.sum(dim=dim), (level & mine).sum(dim=dim)))
    return found[0], found[1]


@pytest.mark.parametrize(("noise", "dense"), [(0.5, False), (0.5, True), (0.0, False)])
def test_near_scores_are_told_apart_in_float64(noise: float, dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of a tile: few scores near a limit, and so many that all are computed in float64."""
    monkeypatch.setattr(metrics, "DENSE", 10**9 if dense else 1)
    monkeypatch.setattr(metrics, "COLUMNS", 23)
    monkeypatch.setattr(metrics, "AT_ONCE", 640)
    images, texts, owners = captioned(60, 200, 64, noise)
    images = torch.nn.functional.normalize(images + 40, dim=1)  # all alike but for the last digits of a float32
    texts = torch.nn.functional.normalize(texts + 40, dim=1)
    expected = dense_places(images, texts, owners)
    for rows in (7, 2048):
        for found, truth in zip(place_pairs(images, texts, owners, World(), rows=rows), expected, strict=True):
            assert all(map(torch.equal, found, truth))
    assert not noise or expected[1].ahead.unique().numel() > 20
    assert expected[0].level.max() > 1 and (images @ texts.T).min() > 0.9999


def metrics_of_equal(
    images: torch.Tensor, texts: torch.Tensor, owners: list[int], words: list[int]
) -> dict[str, float]:
    """By the whole matrix: a caption is right for each image that has one with the same words."""
    has = [{words[t] for t in range(len(words)) if owners[t] == i} for i in range(len(images))]
    right = np.array([[words[t] in has[i] for i in range(len(images))] for t in range(len(words))])
    scores = (texts.double() @ images.double().T).numpy()
    found = {"chance_R@1": right.mean()}
    for way, of, good in (("text_to_image", scores, right), ("image_to_text", scores.T, right.T)):
        best = np.where(good, of, -9).max(axis=1, keepdims=True)
        ahead, level = (of - best > TIE).sum(axis=1).tolist(), np.abs(of - best) <= TIE
        counts = list(zip(ahead, level.sum(axis=1).tolist(), (level & good).sum(axis=1).tolist(), strict=True))
        for k in (1, 5, 10):
            slots = [min(max(k - a, 0), n) for a, n, _ in counts]
            misses = [math.comb(n - r, s) / math.comb(n, s) for s, (_, n, r) in zip(slots, counts, strict=True)]
            found[f"{way}_R@{k}"] = 1 - np.mean(misses)
        found[f"{way}_median_rank"] = np.median([a + (n + 1) / (r + 1) for a, n, r in counts])
    return found


def recalls_of_equal(
    world: World, images: torch.Tensor, texts: torch.Tensor, owners: torch.Tensor, words: torch.Tensor
) -> tuple[dict[str, float], int]:
    mine = part(world, images)
    start = sum(world.gather_objects(len(mine))[: world.rank])
    own = (owners >= start) & (owners < start + len(mine))
    equal = EqualCaptions.find(words[own], owners[own] - start, world)
    assert equal is not None and torch.equal(world.gather_rows(texts[own])[equal.first], texts[own])
    return dict(recalls(mine, texts[own], world, owners=owners[own] - start, equal=equal)), int(own.sum())


@pytest.mark.parametrize(("size", "several"), [(1, False), (2, True), (3, True)])
def test_a_caption_of_several_images_is_right_for_each(size: int, several: bool) -> None:
    """Also if an image has other captions, or the same one twice, and if two texts have the same features."""
    draw = torch.Generator().manual_seed(size)
    n, kinds = 47, 9
    images = torch.nn.functional.normalize(torch.randn(n, 6, generator=draw), dim=1)
    images[5] = images[4]
    owners = torch.arange(n).repeat_interleave(torch.randint(1, 4, (n,), generator=draw) if several else 1)
    words = torch.randint(0, kinds, (len(owners),), generator=draw)
    words[: kinds // 2] = torch.arange(kinds // 2) + kinds  # which no other has
    rows = torch.nn.functional.normalize(torch.randn(2 * kinds, 6, generator=draw), dim=1)
    rows[1] = rows[0]
    expected = metrics_of_equal(images, rows[words], owners.tolist(), words.tolist())
    parts = run_ranks(size, recalls_of_equal, images, rows[words], owners, words)
    assert sum(count for _, count in parts) == len(owners)
    for found, _ in parts:
        assert found["captions"] == len(owners) and found["n"] == n
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, abs=1e-12), name
    assert EqualCaptions.find(torch.arange(n), torch.arange(n), World()) is None
    assert EqualCaptions.find(torch.tensor([3, 3, 4]), torch.tensor([0, 0, 1]), World()) is None  # twice for one image


def test_a_collapsed_model_scores_chance_and_one_of_no_numbers_nothing() -> None:
    same, nan = torch.nn.functional.normalize(torch.ones(40, 8), dim=1), torch.full((40, 8), torch.nan)
    result, none = dict(recalls(same, same, World())), dict(recalls(nan, nan, World()))
    for key, k in ((f"{way}_R@{k}", k) for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)):
        assert result[key] == pytest.approx(k / 40) and none[key] == 0


def test_hits_and_places_of_ties_are_those_of_chance() -> None:
    """Over all orders of the level answers."""
    for ahead, level, right in ((0, 4, 2), (1, 5, 3), (3, 3, 3), (2, 6, 1)):
        orders = list(itertools.permutations([True] * right + [False] * (level - right)))
        firsts = [ahead + order.index(True) + 1 for order in orders]
        places = Ranks(*(torch.tensor([x]) for x in (ahead, level, right)))
        for k in (1, 2, 4, 10):
            expected = np.mean([first <= k for first in firsts])
            assert places.hits(k).item() == pytest.approx(expected, abs=1e-12)
        assert places.first(99).item() == pytest.approx(np.mean(firsts))


def evaluate_rows(world: World, shards: str, captions: Literal["all"] | None) -> dict[str, float]:
    settings = RetrievalSettings(data=SourceSettings(shards=shards, caption=CAPTION), captions=captions, batch_size=7)
    context = context_of(world, examples=8)
    found = evaluated(settings, context)
    shown = {int(e.pixels.sum()) for e in context.examples}
    assert len(context.examples) == len(shown), "each picture is shown once"
    assert shown or not world.is_main or shards.endswith(".csv"), "the table is one shard, of another rank"
    assert all(" of 40" in e.note for e in context.examples)
    return found


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def evaluate_equal(world: World, shards: str) -> dict[str, float]:
    """With towers that know the caption of each image: by the letter of a text, and the grey of an image."""
    settings = RetrievalSettings(data=SourceSettings(shards=shards, caption=CAPTION), batch_size=7)
    context = context_of(world)
    place = torch.eye(5)
    context.encode_image = lambda images: place[(images.double().mean(dim=(1, 2, 3)) / 255 * 4).round().long()]  # type: ignore[method-assign]
    context.encode_text = lambda ids: place[ids[:, 0].long() - ord("a")]  # type: ignore[method-assign]
    return evaluated(settings, context)


def test_captions_that_repeat_are_told_and_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """40 images with 5 captions: the own image alone would be 12.5% for towers that tell captions apart."""
    grey = [Image.new("RGB", (32 + n, 32), (255 * (n % 5) // 4,) * 3) for n in range(40)]
    rows = [{"__key__": f"{n:02d}", "jpg": png(image), "txt": "abcde"[n % 5]} for n, image in enumerate(grey)]
    for shard in range(4):
        write_tar(tmp_path / f"{shard}.tar", rows[10 * shard : 10 * shard + 10])
    with caplog.at_level("INFO"):
        found = evaluate_equal(World(), f"{tmp_path}/{{0..3}}.tar")
    assert found["n"] == found["captions"] == 40 and found["chance_R@1"] == 0.2
    assert found["image_to_text_R@1"] == found["text_to_image_R@1"] == 1.0
    assert found["image_to_text_median_rank"] == found["text_to_image_median_rank"] == 1.0
    assert "40 captions have 5 different texts, one of them 8 times: a text counts as right" in caplog.text


def test_samples_that_share_a_picture_count_as_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In tars and in a table: as one picture with several captions."""
    pairs = [(n % 13, f"{n} of 40") for n in range(40)]
    for n in range(13):
        (tmp_path / f"{n}.jpg").write_bytes(picture(n))
    texts = ["\n".join(text for own, text in pairs if own == n) for n in range(13)]
    write_tar(tmp_path / "grouped.tar", [{"__key__": f"{n}", "jpg": picture(n), "txt": texts[n]} for n in range(13)])
    rows = [{"__key__": f"{i:02d}", "jpg": picture(n), "txt": text} for i, (n, text) in enumerate(pairs)]
    for shard in range(4):
        write_tar(tmp_path / f"rows{shard}.tar", rows[10 * shard : 10 * shard + 10])
    (tmp_path / "rows.csv").write_text("filepath,txt\n" + "".join(f"{n}.jpg,{text}\n" for n, text in pairs))
    with caplog.at_level("INFO"):
        truth = evaluate_rows(World(), f"{tmp_path}/grouped.tar", "all")
        assert truth["n"] == 13 and truth["captions"] == 40 and "different images" not in caplog.text
        evaluate_rows(World(), f"{tmp_path}/rows.csv", None)
        assert "40 samples have 13 different images" in caplog.text
    for shards in (f"{tmp_path}/rows{{0..3}}.tar", f"{tmp_path}/rows.csv"):
        for result in run_ranks(3, evaluate_rows, shards, None):
            for name, value in result.items():
                assert value == pytest.approx(truth[name], abs=1e-9), (shards, name)


def test_nothing_usable_is_an_error(tmp_path: Path) -> None:
    make_shards(tmp_path, [2, 3, 4], txt=b"")
    with pytest.raises(DataError, match="usable"):
        evaluated({"type": "retrieval", "data": {"shards": f"{tmp_path}/0000{{0..2}}.tar"}})


def shown(world: World, folder: str) -> list[tuple[str, str, str, list[str], str]]:
    """(group, key, note, guesses, text) of what is shown."""
    context = context_of(world, examples=6)
    section = {"type": "retrieval", "data": {"shards": f"{folder}/*.tar"}, "batch_size": 7}
    assert evaluated(section, context)["n"] == 24
    return [(e.group, e.key, e.note, [text for text, _ in e.guesses], e.text) for e in context.examples]


def test_the_best_and_the_worst_are_shown(tmp_path: Path) -> None:
    """By their places, with captions as they were written: ids end after 16 bytes."""
    texts = [f"no {i} (€) and more" for i in range(24)]
    samples = [{"__key__": f"{i}", "jpg": picture(i), "txt": texts[i]} for i in range(24)]
    for shard in range(3):
        write_tar(tmp_path / f"{shard}.tar", samples[8 * shard : 8 * shard + 8])
    mine, other = run_ranks(2, shown, str(tmp_path))
    images, captions = open_clip_features(range(24), texts)
    scores = (images @ captions.T).numpy()
    found = int((scores.argmax(axis=1) == np.arange(24)).sum())  # only these are the best, if there are some
    assert [group for group, *_ in mine] == ["best"] * min(found or 3, 3) + ["worst"] * 3
    assert other == []
    for _, key, note, guesses, text in mine:
        i = int(key.rpartition("/")[2])
        order = np.argsort(-scores[i])
        assert note.startswith(f"its caption is in place {int(np.flatnonzero(order == i)[0]) + 1}"), note
        assert [int(guess.split()[1]) for guess in guesses] == order[:3].tolist()
        seen, _, rest = text.partition(f" {CUT} ")
        assert seen.startswith(f"no {i} (€) ") and "".join((seen + rest).split()) == "".join(texts[i].split())
