"""The loader in loops of one's own: the batches of training, epochs, ranks, positions, and other trainers."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch

import clipstream
from clipstream.errors import DataError, SettingsError
from tests.support.pictures import make_shards
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL

SMALL: dict[str, Any] = {"batch_size": 6, "workers": 1, "device": "cpu", "seed": 3}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    """24 samples in 3 shards."""
    folder = tmp_path_factory.mktemp("shards")
    make_shards(folder, [9, 8, 7])
    return f"{folder}/*.tar"


def test_batches_are_normalised_pictures_and_ids(shards: str) -> None:
    with (
        clipstream.build_loader(shards, 20, **SMALL) as loader,
        clipstream.build_loader(shards, (20, 20), dtype="uint8", **{**SMALL, "workers": 2}) as raw,
    ):
        assert len(loader) == len(raw) == 4 and loader.preprocess.size == (20, 20)
        pairs = list(zip(loader, raw, strict=True))
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (loader.preprocess.mean, loader.preprocess.std))
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    kept = {key: pixels for _, batch in pairs for key, pixels in zip(batch.keys, batch.images, strict=True)}
    for (images, texts), batch in pairs:
        assert batch.images.dtype == torch.uint8 and images.dtype == torch.float32 and texts.dtype == torch.int64
        torch.testing.assert_close(images, (batch.images.float() / 255 - mean) / std, rtol=0, atol=1e-6)
        captions = [f"picture {int(key.rpartition('/')[2])}" for key in batch.keys]
        assert torch.equal(texts, tokenizer(captions)) and torch.equal(texts, batch.texts)
    assert len({pixels.sum().item() for pixels in kept.values()}) > 1  # a batch is no view of a buffer


def test_an_epoch_has_a_length_and_in_the_mode_indexed_each_sample_once(shards: str) -> None:
    for mode, different in (("indexed", 24), ("epoch", None)):  # the latter draws shards with replacement
        with clipstream.build_loader(shards, 16, None, {"data.sampling.mode": mode}, **SMALL) as loader:
            first, second = ([key for batch in loader for key in batch.keys] for _ in range(2))
        assert len(first) == len(second) == 24 and first != second
        assert different is None or len({*first}) == len({*second}) == different


def test_a_loop_goes_on_where_it_was_left_and_where_a_state_was_taken(shards: str) -> None:
    with clipstream.build_loader(shards, 16, **SMALL) as loader:
        whole = [batch.keys for _ in range(2) for batch in loader]
    assert len(whole) == 8
    first = clipstream.build_loader(shards, 16, **SMALL)
    found = []
    for batch in first:
        found.append(batch.keys)
        if batch.step == 1:
            break
    found += [batch.keys for batch in first]
    assert found == whole[:4]
    found.append(next(iter(first)).keys)
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    assert next(iter(first)).keys == whole[5]  # what is closed goes on as well
    first.close()
    other = clipstream.build_loader(shards, 16, **{**SMALL, "workers": 0})
    other.load_state_dict(state)
    assert [*found, *(batch.keys for batch in other)] == whole
    fresh = clipstream.build_loader(shards, 16, **SMALL)
    fresh.load_state_dict(fresh.state_dict())
    assert next(iter(fresh)).keys == whole[0]
    fresh.close()
    wrong = clipstream.build_loader(shards, 16, **{**SMALL, "seed": 4})
    wrong.load_state_dict(state)
    with pytest.raises(SettingsError, match="seed"):
        next(iter(wrong))
    for broken, text in (({}, "not a state_dict of a BatchLoader"), ({**state, "format": 0}, "format 0, .* reads")):
        with pytest.raises(ValueError, match=text):
            wrong.load_state_dict(broken)


def on_a_rank(world: Any, shards: str) -> tuple[list[tuple[str, ...]], dict[str, Any], tuple[int, int]]:
    options = {**SMALL, "batch_size": 12 // world.size, "workers": 0}
    with clipstream.build_loader(shards, 16, **options) as loader:
        keys = [batch.keys for batch in loader] + [next(iter(loader)).keys]
        return keys, loader.state_dict(), (len(loader), len(keys[0]))


def test_ranks_share_batches_and_a_state_suits_any_number_of_them(shards: str) -> None:
    ((whole, _, _),) = run_ranks(1, on_a_rank, shards)
    (keys, state, sizes), (others, other_state, _) = run_ranks(2, on_a_rank, shards)
    assert [a + b for a, b in zip(keys, others, strict=True)] == whole
    assert state == other_state and sizes == (2, 6)
    with clipstream.build_loader(shards, 16, **{**SMALL, "batch_size": 12}) as loader:
        loader.load_state_dict(state)
        after = [batch.keys for batch in loader]
    with clipstream.build_loader(shards, 16, **{**SMALL, "batch_size": 12}) as loader:
        assert [batch.keys for _ in range(2) for batch in loader][3:] == after


def test_a_forked_process_is_refused_and_takes_no_batch(shards: str) -> None:
    with clipstream.build_loader(shards, 16, **SMALL) as loader:
        batches = iter(loader)
        first = next(batches)
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            try:
                next(batches)
                os.write(write, b"a batch")
            except Exception as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.close(write)
        os.waitpid(child, 0)
        assert f"belongs to process {os.getpid()}" in os.read(read, 1000).decode()
        rest = [first.keys, *(batch.keys for batch in batches)]
    with clipstream.build_loader(shards, 16, **SMALL) as loader:
        assert [batch.keys for batch in loader] == rest


def test_settings_files_and_functions(shards: str, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    (tmp_path / "my.yaml").write_text(
        f"model: {{name: {tmp_path}/model.json}}\nrun: {{seed: 3}}\n"
        f"data: {{global_batch_size: 6, workers: 0, sources: {{train: {{shards: '{shards}'}}}}}}\n"
    )
    with clipstream.build_loader(str(tmp_path / "my.yaml"), device="cpu", train_num_samples=13) as loader:
        assert len(loader) == 2 and [images.shape[2:] for images, _ in loader] == [(16, 16)] * 2
        assert next(iter(loader)).texts.shape == (6, 8) == loader.tokenizer(["a"] * 6).shape
    characters = lambda texts: torch.tensor([[len(text), *text.encode().ljust(3)[:3]] for text in texts])  # noqa: E731
    with clipstream.build_loader(clipstream.load_settings(loader.settings), 8, characters, mean=[0] * 3, std=[1] * 3,
                                 dtype=torch.bfloat16, device="cpu") as own:  # fmt: skip
        images, texts = next(iter(own))
    assert texts[:, 1:].tolist() == [[*b"pic"]] * 6 and images.dtype == torch.bfloat16 and images.min() >= 0
    model = clipstream.load_model(tmp_path / "model.json", device="cpu")[0]
    with clipstream.build_loader(shards, model, **SMALL) as by_model:
        assert next(iter(by_model)).texts.shape == (6, 8)
    theirs, tokenizer = open_clip.CLIP(**MODEL), open_clip.get_tokenizer("ViT-B-32", context_length=8)
    config = {"size": 16, "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bilinear", "resize_mode": "squash"}
    open_clip.model.set_model_preprocess_cfg(theirs, config)
    with clipstream.build_loader(shards, theirs, tokenizer, **SMALL) as loader:
        assert loader.preprocess.mean == (0.5, 0.5, 0.5) and loader.preprocess.image.resize_mode == "squash"
    with pytest.raises(SettingsError, match=r"tokenizer: required, such as"):
        clipstream.build_loader(shards, theirs)


def test_mistakes_are_named(shards: str, tmp_path: Path) -> None:
    cases: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        (r"--batch-sise: unknown flag; did you mean '--batch-size'", (shards, 16), {"batch_sise": 4}),
        (r"dtype: 'int8' is not one of float32", (shards, 16), {"dtype": "int8"}),
        (r"none\*\.tar", (f"{tmp_path}/none*.tar", 16), {}),
        (r"preprocess: expected .*, not str", (shards, "ViT-B-32"), {}),
        (r"tokenizer: expected ids of shape \[2, T\] for 2 texts", (shards, 16, lambda texts: [1] * len(texts)), {}),
        (r"an epoch of 24 samples is smaller than a batch of 25: use a smaller", (shards, 16), {"batch_size": 25}),
        (r"no usable sample: see clipstream\.check", (str(tmp_path / "junk.tar"), 16), {}),
        (r"preprocess is a positional argument: build_loader\(data, preprocess", (shards,), {"preprocess": 16}),
        (r"tokenizer is a positional argument", (shards, 16), {"tokenizer": len}),
        (r"overrides is a positional argument", (shards, 16), {"overrides": {"data.workers": 0}}),
        (
            r"build_loader gives one text of a sample",
            (shards, 16, None, {"data.sources.train.caption.negatives": "swap"}),
            {},
        ),
    ]
    (tmp_path / "junk.tar").write_bytes(b"no tar" * 100)
    if not torch.cuda.is_available():
        cases.append((r"device 'cuda': no GPU is available to torch", (shards, 16), {"device": "cuda"}))
    for text, arguments, options in cases:
        with pytest.raises(SettingsError, match=text):
            clipstream.build_loader(*arguments, **{**SMALL, **options})
    with (
        pytest.raises(DataError, match="no_caption"),
        clipstream.build_loader(shards, 16, caption_json="caption.de", **SMALL) as loader,
    ):
        next(iter(loader))
    remote = clipstream.build_loader("pipe:cat none.tar", 16, **SMALL)
    with pytest.raises(TypeError, match="train_num_samples="):
        len(remote)


def test_workers_end_when_nobody_holds_the_loader(shards: str) -> None:
    loader = clipstream.build_loader(shards, 16, **SMALL)
    next(iter(loader))
    (pid,) = loader._start_loader().worker_pids()
    assert Path(f"/proc/{pid}").exists() or not Path("/proc").exists()
    del loader
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()
