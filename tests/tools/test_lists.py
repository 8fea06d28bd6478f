"""Lists of samples: every list that a verb writes names the same samples in every verb that reads one, for every kind
of source; and a list that does not is an error.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from clipstream.cli.verbs import check, pack, precompute, search
from clipstream.cli.verbs import filter as filter_verb
from clipstream.data.groups import look_up
from clipstream.data.settings import DataSettings
from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources import Source, SourceContext
from clipstream.errors import SettingsError
from clipstream.storage.shard_cache import ShardCache
from tests.support.loaders import evaluation_of, loader
from tests.support.runs import MODEL
from tests.support.tars import write_tar

N = 12  # samples; the last three are copies of the first three
SAMPLES = range(N)
SUFFIXES = ".csv", ".jsonl", ".parquet", ".txt"


def caption(i: int) -> str:
    return f"picture {i} of them, {'red' if i % 3 else 'blue'}"


def image(i: int) -> bytes:
    import io

    pixels = np.random.default_rng(i % 9).integers(0, 256, (4, 4, 3), dtype=np.uint8).repeat(5, 0).repeat(5, 1)
    Image.fromarray(pixels).save(buffer := io.BytesIO(), "PNG")
    return buffer.getvalue()


def put(path: Path, data: bytes | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())


def images(folder: Path, numbers: Iterable[int]) -> list[dict[str, Any]]:
    """Images in a folder, and the rows of a table beside it that names them."""
    for i in numbers:
        put(folder / f"i/{i:02d}.png", image(i))
    return [{"file_name": f"i/{i:02d}.png", "title": caption(i)} for i in numbers]


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        put(path, "".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as sink:
            sink.write_table(table)


def tars(folder: Path, names: list[str]) -> str:
    for number, name in enumerate(names):
        part = [i for i in SAMPLES if i * len(names) // N == number]
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # The same keys in each: only the shard tells samples apart.
        write_tar(path, [{"__key__": f"k/{at}", "png": image(i), "txt": caption(i)} for at, i in enumerate(part)])
    return "::".join(str(folder / name) for name in names)


def tables(folder: Path, names: list[str]) -> str:
    for number, name in enumerate(names):
        path = folder / name
        write_table(path, images(path.parent, [i for i in SAMPLES if i * len(names) // N == number]))
    return "::".join(str(folder / name) for name in names)


def pairs(folder: Path, names: list[str]) -> str:
    for i in SAMPLES:
        put(folder / f"photos/a/{i:02d}.png", image(i))
        put(folder / f"photos/a/{i:02d}.txt", caption(i))
    return str(folder / "photos")


def classes(folder: Path, names: list[str]) -> str:
    for i in SAMPLES:
        put(folder / f"pets/{['cat', 'dog'][i % 2]}/x/{i:02d}.png", image(i))
    return str(folder / "pets")


KINDS: dict[str, tuple[Callable[[Path, list[str]], str], list[str]]] = {
    "tars": (tars, ["0.tar", "1.tar"]),
    "tars of one name": (tars, ["en/0.tar", "fr/0.tar"]),
    "csv": (tables, ["labels.csv"]),
    "jsonl": (tables, ["labels.jsonl"]),
    "parquet": (tables, ["a-00000-of-00002.parquet", "a-00001-of-00002.parquet"]),
    "arrow": (tables, ["data-00000-of-00001.arrow"]),
    "Hugging Face": (tables, ["one/metadata.csv", "two/metadata.csv"]),
    "folder": (pairs, []),
    "classes": (classes, []),
}


def run_here(do: Callable[[int], object], count: int, executor: str) -> Iterator[tuple[int, object]]:
    """Tasks without processes, whose start takes longer than what they do here."""
    return ((number, do(number)) for number in range(count))


def run(main: Callable[[list[str]], int], *argv: object) -> None:
    assert main([str(word) for word in argv]) == 0


class Made:
    """A source, the store of its features, and the lists that verbs write of them: file -> number of its samples."""

    def __init__(self, folder: Path, kind: str) -> None:
        write, names = KINDS[kind]
        self.folder, self.kind, self.shards = folder, kind, write(folder / "data", names)
        self.flags = ["--caption-key", "class"] if kind == "classes" else []
        put(folder / "model.json", json.dumps(MODEL))
        store = folder / "store"
        given = ["--train-data", self.shards, "--model", folder / "model.json", "--towers", "both", *self.flags]
        words = "--precision fp32 --device cpu --run.threads 1 --workers 0"
        run(precompute.main, store, *given, *words.split())
        self.lists: dict[str, int] = {}
        at = list(KINDS).index(kind)
        for number, (main, *words) in enumerate(
            (
                (search.main, "duplicates", store, "--threshold", "0.9999"),
                (search.main, "scores", store, "--min-score", "-1"),
                (filter_verb.main, self.shards, "--where", "width > 3", *self.flags),
            )
        ):
            suffix = SUFFIXES[(at + number) % len(SUFFIXES)]  # each with each, over the kinds
            name = f"{('duplicates', 'scores', 'filter')[number]}{suffix}"
            self._write(main, *words, out=name, rows=N if number else 3)
        self._write(search.main, "doubt", store, "--worst", "4", out="doubt.csv", rows=4)
        self._write(
            search.main, "neighbours", store, "--query-image", folder / "q.png", "-k", "5", out="near.csv", rows=5
        )
        put(folder / "words.txt", "picture\nred\nof\nblue\ncat\ndog\n")
        self._write(
            filter_verb.main, self.shards, *self.flags, "--balance", folder / "words.txt", "--t", "4",
            out="probability.jsonl", rows=N,
        )  # fmt: skip
        self._write(
            search.main, "neighbours", store, "--mine", "image-image", "-k", "2", "--max-cosine", "1",
            out="mined.jsonl", rows=N,
        )  # fmt: skip
        run(check.main, self.shards, "--all", "--json", folder / "all.json", *self.flags)
        found = json.loads((folder / "all.json").read_text())["problems"]
        said = next(one["examples"] for one in found if one["problem"] == "repeated_files")
        put(folder / "check.txt", "\n".join(said))
        self.lists["check.txt"] = len(said)

    def _write(self, main: Callable[[list[str]], int], *argv: object, out: str, rows: int) -> None:
        put(self.folder / "q.png", image(4))
        run(main, *argv, "--out", self.folder / out)
        self.lists[out] = rows

    def settings(self, **source: Any) -> DataSettings:
        caption = {"type": "label", "label": "class"} if self.kind == "classes" else {"type": "text", "key": "txt"}
        mode = {"mode": "indexed", "remainder": "pad"}
        given = {"shards": self.shards, "caption": caption, **source}
        return DataSettings.model_validate(
            {"global_batch_size": N, "lanes": 2, "workers": 0, "sources": {"train": given}, "sampling": mode}
        )


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("lists")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLIPSTREAM_CACHE", str(folder / "cache"))
        patch.setattr("clipstream.utils.executors.run", run_here)
        yield Made(folder, request.param)


def used_of(made: Made, **source: Any) -> int:
    """Samples that an epoch of training uses."""
    with loader(made.settings(**source)) as batches:
        return int((next(batches).weights > 0).sum())


def packed(made: Made, flag: str, path: Path) -> int:
    out = path.with_name(f"packed-{flag}-{path.name}")
    run(pack.main, out, made.shards, f"--data.sources.train.{flag}", path, *made.flags)
    return sum(json.loads((out / "sizes.json").read_text()).values())


def test_each_list_works_in_each_reader(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    for name, rows in made.lists.items():
        path = made.folder / name
        evaluated = evaluation_of(SourceSettings(**made.settings(keep=str(path)).sources["train"].model_dump()))
        with evaluated as batches:
            assert sum(len(batch) for batch in batches) == rows, name
        assert used_of(made, keep=str(path)) == rows, name
        assert packed(made, "keep", path) == rows, name
        assert rows == N or used_of(made, drop=str(path)) == packed(made, "drop", path) == N - rows, name
        capsys.readouterr()
        if "score" not in name and "near" not in name and "doubt" not in name:
            run(filter_verb.main, made.shards, "--where", "x IS NOT FALSE", "--scores", f"x={path}", *made.flags)
            assert f"{rows} of {N} samples kept" in capsys.readouterr().out, name


def test_numbers_of_samples_and_their_neighbours(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    source = Source(made.settings().sources["train"], SourceContext(ShardCache(None), key="data.sources.train"))
    settings = made.settings()
    look_up(source, settings.model_copy(update={"hard_negatives": str(made.folder / "mined.jsonl")}))
    assert source.neighbours is not None and (source.neighbours >= 0).sum() >= N
    path = str(made.folder / "probability.jsonl")
    source = Source(made.settings(probability=path).sources["train"], source.context)
    look_up(source, made.settings(probability=path))
    assert source.probabilities is not None and not np.isnan(np.concatenate(source.probabilities)).any()
    scores = next(name for name in made.lists if name.startswith("scores"))
    if not scores.endswith(".txt"):
        run(filter_verb.main, made.shards, "--where", "s > -2", "--scores", f"s={made.folder / scores}", *made.flags)
    run(filter_verb.main, made.shards, "--where", "s > -2", "--scores", f"s={made.folder / 'store'}", *made.flags)
    assert "lacks" not in capsys.readouterr().out


def test_a_list_that_matches_less_is_an_error(made: Made) -> None:
    rows = (made.folder / "check.txt").read_text().split()
    for wrong in (["other.csv/1"], [*rows, f"{rows[0].rpartition('/')[0]}/absent"]):
        path = made.folder / "wrong.txt"
        path.write_text("\n".join(wrong))
        for flag in ("keep", "drop"):
            with pytest.raises(SettingsError, match=f"{len(wrong) - 1} of its {len(wrong)} entries match") as caught:
                used_of(made, **{flag: str(path)})
            assert wrong[-1] in str(caught.value)
            with pytest.raises(AssertionError):  # of the exit code
                packed(made, flag, path)
