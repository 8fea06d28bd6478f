"""The proof of an export: image files and raw texts go through the exported files alone, without clipstream.

The model and a folder enter; the table of differences leaves, printed and in `check.json`, or an error.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ftfy
import numpy as np
import torch
from PIL import Image

from clipstream.api.model import Model
from clipstream.data.decode.captions import build_caption, image_bytes
from clipstream.data.decode.image_files import EXTRAS
from clipstream.data.decode.images import is_transparent, load_image, open_image
from clipstream.data.source_settings import SourceSettings
from clipstream.data.sources import Source, SourceContext
from clipstream.errors import ClipstreamError, Dropped, SettingsError, ShardError
from clipstream.export.files import unescape
from clipstream.storage.shard_cache import ShardCache
from clipstream.storage.shard_url import redact_tree
from clipstream.text import MESSAGE, printable

SAMPLES = 100
TOWER = 1e-5  # largest difference of a feature of length 1, for equal pixels or ids
COSINE = 0.9999  # smallest cosine from end to end
# Features of unlike inputs may be close to each other, as those of random weights are: then a wrong processor changes
# the cosine little. Without their mean they are compared as well.
CENTRED = 0.999
HARDLY = 1e-3  # features that are nearer to their mean have no direction from it that could be compared
FILES: tuple[tuple[int, str, str, dict[str, Any]], ...] = (  # bands, mode, format
    (3, "RGB", "JPEG", {}),
    (3, "RGB", "PNG", {}),
    (4, "RGBA", "PNG", {}),
    (1, "L", "PNG", {}),
    (2, "LA", "PNG", {}),
    (3, "P", "PNG", {"transparency": 7}),
    (3, "P", "PNG", {}),
    (1, "I;16", "PNG", {}),
    (3, "CMYK", "JPEG", {}),
    (1, "1", "PNG", {}),
)
BLOCK = (
    "import runpy, sys; sys.modules['clipstream'] = None; sys.path.insert(0, sys.argv[1]); sys.argv = sys.argv[2:]; "
)
BLOCK += "runpy.run_path(sys.argv[0], run_name='__main__')"


@dataclass(frozen=True)
class ProofSamples:
    """Image files and texts that an export is compared on.

    Attributes:
        images: content of each file.
        texts: a text for each image, as it is in the data.
        origin: describes them.
        left_out: how many were not taken, by reason.
        transparent: how many images of the data have transparent pixels, of the `looked_at`.
    """

    images: Sequence[bytes]
    texts: Sequence[str]
    origin: str
    left_out: dict[str, int] = field(default_factory=dict)
    transparent: int = 0
    looked_at: int = 0


@dataclass(frozen=True)
class Line:
    """A line of the table: what was compared, the worst value, its bar, and whether it holds."""

    what: str
    worst: float
    bar: str
    holds: bool


def draw_samples(seed: int = 0) -> ProofSamples:
    """Images of odd sizes and modes, and texts with capitals, punctuation, entities and letters of other scripts."""
    rng, images, texts = np.random.default_rng(seed), [], []
    pool = ["A photo of", "the RED", "bird’s", "“quoted”", "café", "naïve", "Bär", "red & blue", "salt &amp; pepper"]
    pool += ["two  spaces", "3.14", "don't", "(brackets)", "x_y", "日本", "ﬁne", "Ünder", "end.", "\ttab", "😀", "ﬂag!"]
    for number in range(SAMPLES):
        width, height = (int(side) for side in rng.integers(17, 260, 2))
        bands, mode, form, more = FILES[number % len(FILES)]
        coarse = rng.integers(0, 256, (4 + number % 37, 3 + number % 41, bands), dtype=np.uint8).squeeze()
        image = Image.fromarray(coarse if mode != "I;16" else coarse.astype(np.uint16) << number % 9)
        image = image.resize((width, height), Image.Resampling.NEAREST)  # hard edges, of which each filter makes others
        file = BytesIO()
        (image if image.mode == mode else image.convert(mode)).save(file, form, **more)
        images.append(file.getvalue())
        texts.append(" ".join(rng.choice(pool, int(rng.integers(1, 9 if number % 10 else 120)))))
    return ProofSamples(images, texts, f"{SAMPLES} drawn images and texts")


def read(section: SourceSettings) -> ProofSamples:
    """Samples from the first ones of each shard of a source, of all modes of images there, and drawn ones where these
    are too few.

    Raises SettingsError: it has no usable sample.
    """
    shards = redact_tree(section.shards)
    origin = printable(shards if isinstance(shards, str) else ", ".join(shards), MESSAGE)
    extract, chosen, left = build_caption(section.caption), list[tuple[bytes, str]](), Counter[str]()
    transparent, looked_at, plugins = 0, 0, [extra[-1] for extra in EXTRAS.values()]
    with contextlib.closing(ShardCache(None)) as cache:
        source = Source(section, SourceContext(cache))
        names = source.names[:: max(1, len(source.names) // SAMPLES)]
        for number, name in enumerate(names):
            if len(chosen) >= SAMPLES:
                break  # before another shard is downloaded
            try:
                shard = source.open(name)
            except (OSError, ShardError):
                continue
            wanted = -(-(SAMPLES - len(chosen)) // (len(names) - number))
            modes, found = Counter[Any](), list[tuple[int, int, bytes, str]]()
            for ref in shard.index.samples[: 4 * wanted]:
                if len(found) >= 2 * wanted:
                    break
                try:
                    sample = {"__key__": ref.key, "__url__": "", **shard.load(ref)}
                    data, text = image_bytes(sample, keys=section.image_key), extract(sample, None)
                    image = load_image(open_image(data))
                    clear = is_transparent(image)
                except (OSError, ShardError, Dropped):
                    continue
                transparent, looked_at = transparent + clear, looked_at + 1
                if image.format in plugins:
                    left[f"images in {image.format}, which Pillow reads with a plug-in"] += 1
                elif ftfy.fix_encoding(text) != text or html.unescape(unescape(text)) != unescape(text):
                    left["texts in a wrong encoding or with rare HTML entities, which open_clip repairs"] += 1
                else:
                    modes[image.mode, clear] += 1  # those that are rare come before more of the others
                    found.append((modes[image.mode, clear], len(found), data, text))
            chosen += [(data, text) for _, _, data, text in sorted(found)[:wanted]]
            shard.close()
    if not chosen:
        raise SettingsError(f"{origin} holds no image with a text: name other data with --data, or leave it out")
    about, missing, more = f"{len(chosen)} images and texts of {origin}", SAMPLES - len(chosen), draw_samples()
    about += f" and {missing} drawn ones" if missing else ""
    images = [*(image for image, _ in chosen), *more.images[:missing]]
    texts = [*(text for _, text in chosen), *more.texts[:missing]]
    return ProofSamples(images, texts, about, dict(left), transparent, looked_at)


def prove(model: Model, folder: Path, samples: ProofSamples, target: str, variants: Sequence[str]) -> list[Line]:
    """The lines of the table, which is written to `check.json` as well.

    Args:
        folder: with the exported files and their code (`shipped`).
        variants: names of further graphs, which have no bar.

    Raises ClipstreamError: the exported files cannot be loaded.
    """
    with TemporaryDirectory() as name:
        work = Path(name)
        (work / "images").mkdir()
        for number, data in enumerate(samples.images):
            (work / "images" / f"{number:05d}").write_bytes(data)
        (work / "texts.json").write_text(json.dumps(list(samples.texts)), encoding="utf-8")
        paths = sorted((work / "images").iterdir())
        pixels = torch.stack([model.preprocess.pixels(path) for path in paths])
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (model.preprocess.mean, model.preprocess.std))
        given = pixels if target == "onnx" else (pixels.float() / 255 - mean) / std
        ids = model.tokenizer(samples.texts)
        np.savez(work / "equal.npz", pixels=given.numpy(), ids=ids.numpy())
        image, text = (rows.numpy() for rows in (model.encode_image(pixels), model.encode_text(ids)))
        own = {"images": image, "texts": text, "pixels": image, "ids": text}
        found = {variant: _run(folder, work, variant) for variant in ("", *variants)}
    lines = [
        *(_equal(f"{tower} tower, equal {name}", own[name], found[""][name]) for tower, name in TOWERS),
        *(line for _, name in ENDS for line in _end(name, own[name], found[""][name])),
    ]
    for variant in variants:
        lines += _variant(variant, own, found[""], found[variant])
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    told = {"target": target, "files": names, "samples": samples.origin, "left_out": samples.left_out}
    content = {**told, "lines": [asdict(line) for line in lines]}
    (folder / "check.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return lines


TOWERS, ENDS = (("image", "pixels"), ("text", "ids")), (("image", "images"), ("text", "texts"))


def _run(folder: Path, work: Path, variant: str) -> dict[str, Any]:
    """What `check.py` finds in a process that cannot import clipstream, nor reach the Hub."""
    out = work / f"out{variant}.npz"
    folder = folder.resolve()
    code = [sys.executable, "-I", "-B", "-W", "ignore", "-c", BLOCK, str(folder), str(folder / "check.py")]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
    done = subprocess.run([*code, str(work), str(out), variant], env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not out.is_file():
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise ClipstreamError(f"the exported files cannot be used without clipstream: {last}")
    return dict(np.load(out))


def _equal(what: str, own: Any, other: Any) -> Line:
    worst = float(np.abs(own - other).max())
    return Line(f"{what}: largest difference", worst, f"at most {TOWER:g}", worst <= TOWER)


def _cosines(own: Any, other: Any) -> torch.Tensor:
    return torch.cosine_similarity(torch.from_numpy(own), torch.from_numpy(other), dim=-1, eps=1e-12)


def _end(name: str, own: Any, other: Any) -> list[Line]:
    mean, lowest = own.mean(0), float(_cosines(own, other).min())
    lines = [Line(f"{name}, end to end: lowest cosine", lowest, f"at least {COSINE}", lowest >= COSINE)]
    differ = np.linalg.norm(own - mean, axis=-1) > HARDLY
    if differ.any():
        centred = float(_cosines(own - mean, other - mean)[differ].min())
        what = f"{name}, end to end, without the mean: lowest cosine"
        lines.append(Line(what, centred, f"at least {CENTRED}", centred >= CENTRED))
    return lines


def _variant(variant: str, own: dict[str, Any], plain: dict[str, Any], found: dict[str, Any]) -> list[Line]:
    """Cosines, speed and retrieval of a further graph beside the plain one."""
    lines = []
    for tower, name in ENDS:
        lowest = float(_cosines(own[name], found[name]).min())
        lines.append(Line(f"{variant}, {name}, end to end: lowest cosine", lowest, "", True))
        equal = dict(TOWERS)[tower]
        faster = float(plain[f"{equal}_seconds"] / found[f"{equal}_seconds"])
        lines.append(Line(f"{variant}, {tower} tower: times as fast", faster, "", True))
    for label, one in (("float32", plain), (variant, found)):
        ranks = (one["images"] @ one["texts"].T).argmax(1) == np.arange(len(one["images"]))
        lines.append(Line(f"{label}: image-to-text R@1 of {len(ranks)}", float(ranks.mean()), "", True))
    return lines
