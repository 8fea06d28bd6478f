"""Raw samples per CPU-second from local tars: clipstream's verifying reader and webdataset's, and `check --all`.

    python benchmarks/reading.py
    python benchmarks/reading.py --check                        # of images made here
    python benchmarks/reading.py --check 'shards/*.tar' --caption-json caption.en

Both yield every sample's key and the bytes of its three members (jpg, txt, json) from the same generated shards,
which are in the page cache: `small` has images of 2 kB, `photos` of 20 to 120 kB. They alternate over several rounds
in one run; the ratio is the median over the rounds. CPU time is measured, because machines are shared.

On two cores of a shared server: small 15,043 samples per CPU-second, webdataset 1.0.2 2,436, ratio 5.8 (4.9 to 7.3 over
the rounds); photos 12,426 and 2,571, ratio 5.5 (4.5 to 6.3).

`--check` compares what `clipstream check --all` does with each sample with the least that it takes, by the CPU time of
one process, from the page cache: `--headers` with reading all members by the verifying reader, and their CRC-32; the
whole, which decodes and hashes, with reading and decoding alone, of JPEGs in grey at the reduced scale that the hash
needs (all entropy-coded data are read), of other formats by Pillow. Shards have 2,000 samples.

On two busy cores of a shared server, OMP_NUM_THREADS=1, ratio to the floor (lowest to highest of 15 or 5 rounds):
photographs of 350 to 700 px --headers 0.76 (0.53 to 0.86), whole 0.72 (0.70 to 0.73); made JPEGs of 512 pixels 0.96
(0.71 to 1.10) and 0.76 (0.74 to 0.79), of 256 pixels 0.71 and 0.64; PNGs of 64 pixels 0.26 and 0.39, where the floor
reads 42,156 samples/CPU-s.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from zlib import crc32

import made
import simplejpeg
import webdataset as wds
from PIL import Image

from clipstream.config.settings import load
from clipstream.curation.sample_table import Columns, scale_of, table_pass
from clipstream.data.decode.captions import split_keys
from clipstream.data.decode.images import ImageHeader
from clipstream.data.source_settings import IMAGE_KEY
from clipstream.data.sources import Source, SourceContext, expand
from clipstream.storage.tar import Shard

KINDS = {"small": (2_000, 2_000, 10_000), "photos": (20_000, 120_000, 1_000)}  # bytes of a picture, samples of a shard


def make(folder: Path, kind: str, shards: int) -> list[str]:
    """Shards of one kind; their paths."""
    least, most, count = KINDS[kind]
    draws, paths = random.Random(0), []
    for number in range(shards):
        paths.append(str(folder / f"{kind}-{number:05d}.tar"))
        with wds.TarWriter(paths[-1]) as tar:
            for i in range(count):
                caption = f"a picture of number {i}"
                about = {"caption": caption, "url": f"https://example.org/{i}.jpg", "width": 640, "height": 427}
                sample = {"__key__": f"{number:05d}{i:04d}", "jpg": draws.randbytes(draws.randint(least, most))}
                tar.write({**sample, "txt": caption, "json": json.dumps(about).encode()})
    return paths


def ours(paths: list[str]) -> Iterator[int]:
    """Bytes of each sample, by the verified reader."""
    for path in paths:
        shard = Shard(path)
        for ref in shard.index.samples:
            sample = {"__key__": ref.key, "__url__": path, **shard.load(ref)}
            yield len(sample["jpg"]) + len(sample["txt"]) + len(sample["json"])
        assert shard.index.fault is None
        shard.close()


def webdataset(paths: list[str]) -> Iterator[int]:
    """Bytes of each sample, by webdataset's."""
    for sample in wds.DataPipeline(wds.SimpleShardList(paths), wds.tarfile_to_samples()):
        yield len(sample["jpg"]) + len(sample["txt"]) + len(sample["json"])


def rate(read: Callable[[list[str]], Iterator[int]], paths: list[str]) -> tuple[float, int]:
    """Samples per CPU-second, and the bytes of all."""
    began = time.process_time()
    sizes = list(read(paths))
    return len(sizes) / (time.process_time() - began), sum(sizes)


def tiled(paths: list[str], folder: Path) -> list[str]:
    """Two shards of 2,000 samples with the members of these, which are repeated."""
    samples = [shard.load(ref) for shard in map(Shard, paths) for ref in shard.index.samples]
    made = [str(folder / f"{number}.tar") for number in range(2)]
    for path in made:
        with wds.TarWriter(path) as tar:
            for number in range(2_000):
                members = samples[number % len(samples)]
                about = json.dumps({"caption": "a", "url": f"https://example.org/{number}", "width": 640}).encode()
                tar.write({"__key__": f"{number:08d}", "json": about, **members})
    return made


def raw(paths: list[str], *, decoded: bool = False) -> Iterator[int]:
    """Bytes of each sample: all members read by the verifying reader, with their CRC-32; or the image decoded."""
    keys = split_keys(IMAGE_KEY)
    for path in paths:
        shard = Shard(path)
        for ref in shard.index.samples:
            sample = shard.load(ref)
            if decoded:
                decode(next(sample[key] for key in keys if key in sample))
            else:
                for data in sample.values():
                    crc32(data)
            yield sum(map(len, sample.values()))
        shard.close()


def decode(data: bytes) -> None:
    """The floor of decoding an image for its hash."""
    if data[:2] != b"\xff\xd8":
        Image.open(io.BytesIO(data)).load()
        return
    height, width, _, _ = simplejpeg.decode_jpeg_header(data)
    factor = scale_of(ImageHeader("jpeg", (width, height), 1, True))
    least = {"min_height": -(-height // factor), "min_width": -(-width // factor)}
    simplejpeg.decode_jpeg(data, "GRAY", fastupsample=True, **least)


def check(paths: list[str], flags: Sequence[str], rounds: int) -> None:
    """Measure `check --all` beside its floors, and print a line for each."""
    settings = load(["--train-data", "::".join(paths), *flags])
    source, numbers = Source(settings.data.sources["train"], SourceContext(key="data.sources.train")), count()

    def whole(decoded: bool) -> Callable[[list[str]], Iterator[int]]:
        def read(_: list[str]) -> Iterator[int]:
            part = Path(folder) / f"{next(numbers)}"
            part.mkdir()
            work = table_pass(source, settings.data, Columns(decode=decoded), part)
            for number in range(len(work.names)):
                done = work(number)
                assert isinstance(done, int), done
                yield from [1] * done

        return read

    with tempfile.TemporaryDirectory() as folder:
        for title, floor, ours in (
            ("--headers", raw, whole(False)),
            ("decoded, hashed", lambda paths: raw(paths, decoded=True), whole(True)),
        ):
            found = [(rate(floor, paths)[0], rate(ours, paths)[0]) for _ in range(rounds)]
            least, mine = (statistics.median(values) for values in zip(*found, strict=True))
            shares = [second / first for first, second in found]
            spread = f"{min(shares):.2f} to {max(shares):.2f}"
            print(f"{title:<16} floor {least:9,.0f}  check {mine:9,.0f} samples/CPU-s  ratio "
                  f"{statistics.median(shares):.2f} ({spread})", flush=True)  # fmt: skip


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check", nargs="*", metavar="SHARDS", help="measure `check --all`")
    args, flags = parser.parse_known_args()
    if args.check is not None:
        with tempfile.TemporaryDirectory() as folder:
            works = {"shards": expand(args.check)} if args.check else {
                kind: made.make(kind, Path(folder) / kind) for kind in ("jpeg-256", "jpeg-512")
            }  # fmt: skip
            for name, paths in works.items():
                print(name)
                (into := Path(folder) / f"{name}-tiled").mkdir()
                check(tiled(paths, into), flags, args.rounds)
        return
    if flags:
        parser.error(f"unknown flags: {' '.join(flags)}")
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            paths = make(Path(folder), kind, args.shards)
            rounds = []
            for _ in range(args.rounds):
                (first, size), (second, other) = rate(ours, paths), rate(webdataset, paths)
                assert size == other, "both read the same"
                rounds.append((first, second))
        mine, theirs = (statistics.median(values) for values in zip(*rounds, strict=True))
        ratios = [first / second for first, second in rounds]
        spread = f"{min(ratios):.1f} to {max(ratios):.1f}"
        print(
            f"{kind:<7} clipstream {mine:9,.0f}  webdataset {wds.__version__} {theirs:9,.0f} samples/CPU-s"
            f"  ratio {statistics.median(ratios):.1f} ({spread})"
        )


if __name__ == "__main__":
    main()
