"""The verb `clipstream pack OUT SOURCE…`: writes new shards of the samples of any source that trains.

A command line enters; shards leave, with side indexes, `sizes.json`, `SHA256SUMS` and a data card (`README.md`). What
the bytes depend on is kept in `pack.json`, so that the same command continues after an interruption, and another one
is refused. Never imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from rich.filesize import decimal

from clipstream.checkpoint.remote_sync import RemoteDir, with_retries
from clipstream.config.entry import command_line, entry_point, working_in
from clipstream.config.flags import choice_flag, number_flag
from clipstream.config.settings import Settings
from clipstream.curation.packing.lists import PARTS, Corpus, Listed, ListShard, merged_source
from clipstream.curation.packing.sample import Format, Recipe, Recording
from clipstream.curation.packing.shards import Merged, Packed, PackShard, Plan, held_out, packed_before, plan_of
from clipstream.data.decode.key_lists import build_filter, check_lists
from clipstream.data.order_plan import reading_of
from clipstream.data.scan import identity
from clipstream.data.sources import Source, SourceContext, indexes
from clipstream.data.sources.tars import SIZES
from clipstream.errors import DataError, SettingsError, errors_as
from clipstream.storage.download import ShardError
from clipstream.storage.shard_cache import ShardCache, cache_root, written
from clipstream.storage.shard_url import ShardURL, in_braces, redact
from clipstream.text import MESSAGE, counted, duration, listed_lines, printable
from clipstream.utils import atomic_write
from clipstream.utils.executors import MEANING, SHOWN, checked, require_all, work_off
from clipstream.utils.processes import Failed
from clipstream.utils.section import own_path

T = TypeVar("T")
FORM = 1  # of the shards' bytes: another one is another plan
PLAN_FILE, SUMS, CARD = "pack.json", "SHA256SUMS", "README.md"
MEND = "mend them or leave them out; shards that are done are kept"
UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
OWN_FLAGS = {
    "--shard-size": "most samples of a shard, or its bytes with a unit, such as 500MB (default: 10000); source: one "
    "new shard for each of the sources, in their order",
    "--order": "shuffled: over all samples, by --seed (default); source: as the sources have them",
    "--val-split": "share of the samples for OUT/val, without near-duplicates in OUT/train (decodes all images)",
    "--group": "with --val-split: member, column or json:PATH whose equal values stay on one side",
    "--merge": "source with further captions, by key: tars, or a table with the columns key and caption",
    "--check-images": "header (default), or decode: drop images that cannot be decoded, too",
    "--size": "resize images whose shorter side is longer than this, in pixels",
    "--format": f"image format: {', '.join(get_args(Format))} (default: keep)",
    "--quality": "quality of re-encoded JPEG, WebP and AVIF images, 1 to 100 (default: 95)",
    "--license": "license of the data, for the data card (default: unknown)",
    "--executor": f"{MEANING} (default: local, one process per core)",
}


@dataclass(frozen=True)
class Asked:
    """The parsed command line."""

    out: str  # the folder or URL of the new shards
    folder: Path  # that folder, absolute; for a URL one of this machine, for what is not complete
    settings: Settings  # name the sources
    recording: Recording
    size: tuple[int, bool] | None  # of a shard, and whether that is in bytes; None for those of the sources
    shuffled: bool
    share: float | None  # for validation
    group: str | None
    merge: str | None
    license: str
    executor: str

    @property
    def parts(self) -> Path:
        """The folder for what is not kept."""
        return self.folder / PARTS

    @property
    def remote(self) -> RemoteOut | None:
        """The storage of the new shards; None for the folder."""
        return None if ShardURL(self.out).path is not None else RemoteOut(self.out)

    def read(self, name: str) -> bytes | None:
        """A small file beside the shards; None if it does not exist."""
        if (remote := self.remote) is not None:
            return remote.read(name)
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / name).read_bytes()
        return None

    def write(self, name: str, content: str) -> None:
        """Write a small file beside the shards."""
        (path := self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        atomic_write.replace(path, content.encode())
        if (remote := self.remote) is not None:
            remote.put(name, path)


@dataclass(frozen=True)
class RemoteOut:
    """Remote storage for new shards, through fsspec; connected in each process anew."""

    url: str

    def put(self, name: str, file: Path) -> None:
        """See Remote."""
        self._do(lambda out: (out / name).upload(file))

    def index(self, name: str, target: Path) -> int | None:
        """See Remote."""
        content = self.read(f"{name}{indexes.SUFFIX}")
        if content is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        return None if content is None else self._do(lambda out: (out / name).size())

    def read(self, name: str) -> bytes | None:
        """A small file; None if it does not exist. Raises ShardError."""
        return self._do(lambda out: (out / name).read())

    def names(self) -> list[str]:
        """Names of what is there. Raises ShardError."""
        return self._do(lambda out: out.names())

    def _do(self, act: Callable[[RemoteDir], T]) -> T:
        out = RemoteDir(self.url, "OUT")
        try:
            return with_retries(lambda: act(out))
        except Exception as error:  # of fsspec's backends, which have types of their own
            raise ShardError("remote", f"{out.shown}: {redact(str(error)) or type(error).__name__}") from error


@entry_point
def main(argv: list[str]) -> int:
    """Run the verb, and return its exit code: 0, 2 for wrong usage, 3 if samples cannot be read or written."""
    asked = arguments(argv)
    with errors_as(DataError, "", ShardError):
        _claim(asked)
        with working_in(asked.folder):
            pack(asked)
    return 0


def _claim(asked: Asked) -> None:
    """Raises SettingsError: OUT has other files, or is read. It is not changed."""
    folder, remote = asked.folder, asked.remote
    if remote is None:
        there = [path.name for path in folder.glob("[!.]*")]
        atomic_write.claim_output(folder / "0.tar", "OUT")
        atomic_write.claim_output(asked.parts, "OUT", holds=True)
    else:
        there = remote.names()
    if there and PLAN_FILE not in there:
        raise SettingsError(f"{redact(asked.out)} is not empty, it holds {min(there)}: use another folder")


def arguments(argv: Sequence[str]) -> Asked:
    """Parse the command line. Raises SettingsError: a flag or a setting is wrong."""
    command = command_line("pack", argv, OWN_FLAGS)
    own, names = command.own, list[str]()
    flags = list(command.flags)
    while flags and not flags[0].startswith("-"):
        names.append(flags.pop(0))
    if not names:
        raise SettingsError("missing OUT: clipstream pack OUT SOURCE…")
    if names[1:]:
        flags = ["--train-data", "::".join(in_braces(names[1:])), *flags]
    settings = command.load(flags).settings
    if not settings.data.sources:
        raise SettingsError("missing SOURCE: clipstream pack OUT SOURCE…, or --config with data.sources")
    recipe = _recipe(own)
    share = number_flag(own, "--val-split", None)
    if share is not None and share >= 1:
        raise SettingsError(f"--val-split: expected a share above 0 and below 1, not {own['--val-split']!r}")
    if share is None and "--group" in own:
        raise SettingsError("--group requires --val-split")
    if share is not None and "--merge" in own:
        raise SettingsError(
            "--val-split does not compare the captions of --merge: pack with --merge first, then what it wrote with "
            "--val-split"
        )
    size = None if own.get("--shard-size") == "source" else _shard_size(own.get("--shard-size", "10000"))
    for flag in ("--val-split", "--order") if size is None else ():
        if flag in own:
            raise SettingsError(f"{flag} is not supported with --shard-size source, which keeps the sources' shards")
    decode = choice_flag(own, "--check-images", ("header", "decode"), "header") == "decode"
    out = names[0]
    if (local := ShardURL(out).path) is not None:
        out = str(folder := Path(os.path.abspath(own_path(local))))
        if folder.is_file():
            raise SettingsError(
                f"{names[0]} is a file: name the folder of the new shards first (clipstream pack OUT SOURCE)"
            )
    else:
        folder = cache_root() / "packs" / hashlib.sha256(out.encode()).hexdigest()[:24]
        RemoteDir(out, "OUT")  # tells what is wrong with it
    return Asked(
        out,
        folder,
        settings,
        Recording(recipe, decode, settings.data.max_image_pixels),
        size,
        size is not None and choice_flag(own, "--order", ("shuffled", "source"), "shuffled") == "shuffled",
        share,
        own.get("--group"),
        own.get("--merge"),
        own.get("--license", "unknown"),
        checked(own.get("--executor")),
    )


def _recipe(own: Mapping[str, str]) -> Recipe | None:
    """How images are re-encoded; None for no change. Raises SettingsError: a flag is wrong."""
    size, kind = number_flag(own, "--size", None, least=1), choice_flag(own, "--format", get_args(Format), "keep")
    quality = number_flag(own, "--quality", None, least=1, most=100)
    if size is not None or kind != "keep":
        return Recipe(size, cast(Format, kind), 95 if quality is None else quality)
    if quality is not None:
        raise SettingsError("--quality requires --size or --format")
    return None


def _shard_size(text: str) -> tuple[int, bool]:
    """A number of samples, or of bytes; and whether it is of bytes. Raises SettingsError: it is neither."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?b)?", text.strip().lower())
    size = 0 if found is None else int(float(found[1]) * UNITS[found[2] or ""])
    if found is None or size < 1 or (not found[2] and not found[1].isdigit()):
        raise SettingsError(f"--shard-size: expected a number of samples, bytes such as 500MB, or source, not {text!r}")
    return size, bool(found[2])


def pack(asked: Asked) -> None:
    """Write the shards. Raises SettingsError, DataError, WorkInterrupted, OSError."""
    began, parts, folder = time.monotonic(), asked.parts, asked.folder
    remote = asked.remote
    data = asked.settings.data  # a cache with a limit may not hold all that is read at random
    own = data.cache is None or data.cache_gib is not None
    data = data.model_copy(update={"cache": str(parts / "cache") if own else data.cache, "cache_gib": None})
    with contextlib.closing(ShardCache(data.cache, fetcher=data.fetcher)) as store:
        sources = [
            Source(one, SourceContext(store, asked.settings.data.cache, f"data.sources.{name}"))
            for name, one in data.sources.items()
        ]
        extra = None if asked.merge is None else merged_source(asked.merge, SourceContext(store, key="--merge"))
        check_lists([build_filter(one.settings, one.context.key, one) for one in sources], told=False)
        about, digest = _begin(asked, sources, extra)
        if asked.read(CARD) is not None:  # written last
            names = [line.partition("  ")[2] for line in (asked.read(SUMS) or b"").decode().splitlines()]
            if names and all(packed_before(folder, name, digest, remote) for name in names):
                shown = printable(redact(asked.out))
                print(f"{counted(len(names), 'shard', ',')} in {shown}: complete since an earlier call")
                return _print_command(asked, names)
        for path in parts.glob("**/*.part"):  # of a killed call
            path.unlink(missing_ok=True)
        kept = parts / digest  # lists are named by number, and are those of one plan
        corpus = Corpus(sources, kept / "lists")
        found = _list(asked, corpus, "listing")
        further = None if extra is None else Corpus([extra], kept / "merged")
        merged = None if further is None else Merged(further, _list(asked, further, "listing captions"))
        plan = _plan(asked, corpus, found)
        if merged is not None:
            matches = merged.matches(corpus)
            if not matches:
                told = f"no key in {redact(str(asked.merge))} is that of a sample, such as {corpus.first_key!r}"
                raise DataError(f"--merge: {told}")
            print(f"captions are merged into {matches:,} of {int(plan.ends[-1]):,} samples", flush=True)
        if asked.share is not None:
            held_numbers = held_out(corpus, data, asked.share, asked.group, kept / "held.npy", asked.executor)
            plan = replace(plan, held=held_numbers)
        do = PackShard(asked.folder, corpus, plan, asked.recording, digest, merged, remote)
        packed = _pack_all(asked, do)
    _conclude(asked, about, found, [plan.shard(number)[0] for number in range(len(plan))], packed, began)


def _begin(asked: Asked, sources: Sequence[Source], extra: Source | None) -> tuple[dict[str, Any], str]:
    """What the bytes depend on, kept in the folder, and its digest.

    Raises SettingsError: the folder holds other files, or shards of other sources or settings.
    """
    settings, recording = asked.settings, asked.recording
    about: dict[str, Any] = {
        "version": FORM,
        "sources": [
            {"name": source.context.key.rpartition(".")[2], "shards": _shown(source), **reading_of(source.settings),
             "keep": source.settings.keep, "drop": source.settings.drop, "identity": identity(source)}
            for source in sources
        ],
        "merge": None if extra is None else {"shards": _shown(extra), "identity": identity(extra)},
        "images": {**asdict(recording), "recipe": None if recording.recipe is None else asdict(recording.recipe)},
        "shard_size": "source" if asked.size is None else list(asked.size),
        "order": "shuffled" if asked.shuffled else "source",
        "seed": settings.run.seed,
        "val_split": asked.share,
        "group": asked.group,
        "license": asked.license,
    }  # fmt: skip
    asked.parts.mkdir(parents=True, exist_ok=True)
    now = json.loads(json.dumps(about))
    if (content := asked.read(PLAN_FILE)) is None:
        asked.write(PLAN_FILE, json.dumps(about, indent=1) + "\n")
    try:
        before = now if content is None else json.loads(content)
    except ValueError as error:
        raise SettingsError(f"{redact(asked.out)}/{PLAN_FILE} is damaged: use another folder") from error
    if before != now:
        other = [key for key in now if not isinstance(before, dict) or before.get(key) != now[key]]
        raise SettingsError(
            f"{redact(asked.out)} holds shards of another pack, which differs in {', '.join(other)}: use another "
            "folder, or remove it"
        )
    return about, hashlib.sha256(json.dumps(now, sort_keys=True).encode()).hexdigest()[:32]


def _shown(source: Source) -> str:
    urls = map(ShardURL, source.settings.parts)
    return "::".join(url.unsigned if url.is_remote else str(url) for url in urls)


def _list(asked: Asked, corpus: Corpus, label: str) -> list[Listed]:
    def words(done: list[Listed]) -> str:
        return f"{sum(one.samples for one in done):,} samples"

    names = [printable(redact(name)) for _, name in corpus.shards]
    do = ListShard(corpus, measured=asked.size is not None and asked.size[1])
    lists = [do.lists(number) for number in range(len(corpus.sources))]  # before processes are forked
    results = work_off(label, do, names, asked.executor, words)
    found = require_all(label, results, MEND)
    if not any(one.fault for one in found):
        entries = [(of, one.entries) for (of, _), one in zip(corpus.shards, found, strict=True)]
        try:
            check_lists(lists, [[some for of, some in entries if of == number] for number in range(len(lists))])
        except SettingsError:
            (asked.folder / PLAN_FILE).unlink(missing_ok=True)  # the list is to be corrected
            raise
    if faults := [
        f"  {name}: {printable(one.fault, 500)}" for name, one in zip(names, found, strict=True) if one.fault
    ]:
        told = f"damaged shards, of which intact samples are used: {len(faults):,}"
        print(told, *listed_lines(faults, SHOWN), sep="\n", flush=True)
    return found


def _plan(asked: Asked, corpus: Corpus, found: Sequence[Listed]) -> Plan:
    """The plan without a split. Raises DataError: there are no samples."""
    samples = sum(one.samples for one in found)
    if not samples:
        raise DataError("there are no samples to pack: see `clipstream check` of the same sources")
    size = None if asked.size is None else asked.size[0]
    if asked.size is not None and asked.size[1]:  # bytes
        size = max(1, asked.size[0] * samples // max(1, sum(one.size for one in found)))
    plan = plan_of(corpus, found, size, asked.shuffled, asked.settings.run.seed)
    if not plan.unique:
        print("keys of the sources are not unique: the number of its sample is put in front of each", flush=True)
    return plan


def _pack_all(asked: Asked, do: PackShard) -> list[Packed]:
    began, names = time.monotonic(), [do.plan.shard(number)[0] for number in range(len(do.plan))]

    def words(done: list[Packed]) -> str:
        return f"{sum(one.samples for one in done):,} samples  {written(done, asked.parts, began)}"

    results: list[Packed | Failed] = work_off("packing", do, names, asked.executor, words)
    return require_all("packing", results, MEND)


def _conclude(
    asked: Asked,
    about: Mapping[str, Any],
    found: Sequence[Listed],
    names: Sequence[str],
    packed: Sequence[Packed],
    began: float,
) -> None:
    """Write sizes, checksums and the data card, and print a summary and the command of training.

    Raises DataError: no sample was usable.
    """
    samples, size = sum(one.samples for one in packed), sum(one.size for one in packed)
    drops = Counter[str](not_kept=sum(one.dropped for one in found))
    for one in packed:
        drops.update(one.drops)
    told = ", ".join(f"{count:,} {reason}" for reason, count in (+drops).most_common())
    if not samples:
        raise DataError(f"none of the samples is usable ({told}): see `clipstream check` of the same sources")
    whole = {name: one for name, one in zip(names, packed, strict=True) if one.samples}
    for under in {os.path.dirname(name) for name in whole}:
        sizes = {os.path.basename(name): one.samples for name, one in whole.items() if os.path.dirname(name) == under}
        asked.write(os.path.join(under, SIZES), json.dumps(sizes, indent=1) + "\n")
    sums = "".join(f"{one.sha256}  {name}\n" for name, one in whole.items())
    asked.write(SUMS, sums)
    asked.write(CARD, _card(asked, about, whole, +drops))
    made = sum(one.made for one in packed)
    print(
        f"{counted(len(whole), 'shard', ',')} in {printable(redact(asked.out))}: {samples:,} samples, {decimal(size)}"
        f"{f'; dropped: {told}' if told else ''}; {made:,} were written now, in "
        f"{duration(time.monotonic() - began)}"
    )
    if not any("txt" in one.suffixes for one in packed):
        print("they have labels and no captions: train with {type: label, label: cls} as data.sources.train.caption")
    _print_command(asked, list(whole))


def _print_command(asked: Asked, whole: Sequence[str]) -> None:
    """Remove what is not kept, and print the command that trains on these shards."""
    shutil.rmtree(asked.parts if asked.remote is None else asked.folder, ignore_errors=True)
    words = ["clipstream", "train"]
    for flag, under in (("--train-data", "train/"), ("--val-data", "val/"))[: 1 if asked.share is None else 2]:
        names = [f"{redact(asked.out)}/{name}" for name in whole if asked.share is None or name.startswith(under)]
        words += [flag, asked.out if asked.remote is None else "::".join(in_braces(names))]
    print(f"train on them with: {printable(shlex.join(words), MESSAGE)}", flush=True)


def _card(asked: Asked, about: Mapping[str, Any], whole: Mapping[str, Packed], drops: Counter[str]) -> str:
    """The data card, as the Hugging Face Hub shows it."""
    samples, merged = sum(one.samples for one in whole.values()), sum(one.merged for one in whole.values())
    members, images = Counter[str](), Counter[str]()
    for one in whole.values():
        members.update(one.suffixes)
        images.update(one.images)
    splits = {"train": 0, "validation": 0} if asked.share is not None else {"train": 0}
    for name, one in whole.items():
        splits["validation" if name.startswith("val/") else "train"] += one.samples
    rows = [("samples", f"{samples:,}"), *((split, f"{n:,}") for split, n in splits.items() if asked.share is not None)]
    rows += [("shards", f"{len(whole):,}"), ("bytes", f"{sum(one.size for one in whole.values()):,}")]
    rows += [(f"source {one['name']}", f"`{one['shards']}`") for one in about["sources"]]
    if about["merge"] is not None:
        rows.append(("merged captions", f"`{about['merge']['shards']}`, of {merged:,} samples"))
    rows += [("members", ", ".join(f"{suffix} {count:,}" for suffix, count in members.most_common()))]
    rows += [(f"dropped: {reason}", f"{count:,}") for reason, count in sorted(drops.items())]
    rows += [(f"images {what}", f"{count:,}") for what, count in sorted(images.items())]
    rows += [("order", about["order"] + (f", seed {about['seed']}" if asked.shuffled else ""))]
    if asked.share is not None:
        group = f", and groups of {asked.group}" if asked.group else ""
        rows.append(("validation", f"share {asked.share:g}; near-duplicates{group} are on one side"))
    rows = [(printable(name), printable(text, MESSAGE).replace("|", "\\|")) for name, text in rows]
    folders = {"validation": "val/", "train": "train/" if asked.share is not None else ""}
    files = "\n".join(f'  - split: {split}\n    path: "{folders[split]}*.tar"' for split in splits)
    return "\n".join([
        "---", f"license: {json.dumps(asked.license)}", "configs:", "- config_name: default", "  data_files:", files,
        "---", "", f"# {printable(redact(asked.out).rstrip('/').rpartition('/')[2])}", "",
        "Image-text pairs as WebDataset shards, written by `clipstream pack`.",
        "", "| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows), "",
        f"License: {printable(asked.license)}. `{PLAN_FILE}` has all settings; check the files with "
        f"`sha256sum -c {SUMS}`.", "",
    ])  # fmt: skip
