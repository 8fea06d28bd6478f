"""Files of weights in any format: read without running code in them, checked, and loaded into a model or image tower.

A path enters: safetensors, a zip or an older file of torch.save, a TorchScript archive, or a plain pickle, told apart
by their content. Tensors by name leave, with an `Inert` object in place of each object that is no tensor and no plain
value of Python, or a `SettingsError` that names what does not fit. Tensors of zip files are not read before they are
used. Tars of torch before 0.1.10 are not read.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import pickle
import re
import struct
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import torch
from open_clip.factory import convert_state_dict, resize_pos_embed, resize_text_pos_embed
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed

from clipstream.errors import SettingsError, errors_as
from clipstream.models.pretrained import ModelFiles
from clipstream.models.transformers_names import ADAPTER_WEIGHTS, from_transformers, in_transformers, with_adapter
from clipstream.text import lines, listed, listed_lines
from clipstream.utils.content import HEAD, TABLE, describe
from clipstream.utils.logs import logger

LEGACY = 0x1950A86A20F9469CFC6C  # first pickle of a file of torch.save before 1.6
STORAGES = {"BFloat16Storage": torch.bfloat16, "CharStorage": torch.int8, "ByteStorage": torch.uint8}
STORAGES |= {f"{name.title()}Storage": getattr(torch, name)
             for name in ("double", "float", "half", "long", "int", "short", "bool")}  # fmt: skip
_Storage = Callable[[str, torch.dtype, int], torch.Tensor]  # key, type, number of items -> all its items


class Inert(dict[Any, Any]):
    """In place of an object of any class that a pickle names, or of the result of any function: items of a mapping,
    arguments and state are kept, and nothing is done.
    """

    origin = ""  # MODULE.NAME in the pickle
    state: Any = None
    args: tuple[Any, ...] = ()
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        self = super().__new__(cls)
        self.args = args
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __call__(self, *args: Any, **kwargs: Any) -> Inert:
        return Inert()

    def extend(self, items: Any) -> None:
        """Items of a list or a set are dropped."""

    append = add = extend

    def members(self) -> dict[Any, Any]:
        """Items of a mapping, else the attributes of an object."""
        return self or (self.state if isinstance(self.state, dict) else {})


class _Unpickler(pickle._Unpickler):
    """Builds tensors, and an `Inert` object in place of all else. `limit`: bytes of the largest tensor.

    The one of `pickle` in C keeps its memo in an array: a damaged index would take up to 64 GB of memory.
    """

    def __init__(self, file: IO[bytes], storage: _Storage, limit: int) -> None:
        super().__init__(file, encoding="latin1")  # of names that Python 2 wrote
        self._storage, self._limit = storage, limit

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "torch":
            found = STORAGES.get(name) or {
                "_rebuild_tensor": self._tensor,
                "_rebuild_tensor_v2": self._tensor,
                "_rebuild_parameter": lambda data, *_: data,
                "_rebuild_parameter_with_state": lambda data, *_: data,
                "_rebuild_from_type_v2": lambda rebuild, _, args, *__: rebuild(*args),
            }.get(name)
            if found is not None:
                return found
        if (module, name) == ("_codecs", "encode"):  # bytes in protocol 2
            return lambda text, *_: text.encode("latin1")
        return type("Inert", (Inert,), {"origin": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        if not isinstance(pid, tuple) or len(pid) < 5 or not isinstance(pid[1], torch.dtype):
            return Inert()
        _, dtype, key, _, numel, *view = pid
        items = self._storage(str(key), dtype, int(numel))
        return items if not view or view[0] is None else items[view[0][1] : view[0][1] + view[0][2]]

    def _tensor(self, storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Any:
        if not isinstance(storage, torch.Tensor):
            return Inert()
        if math.prod(size) * storage.itemsize > self._limit:
            raise ValueError("a tensor is larger than the file")
        return storage.as_strided(tuple(size), tuple(stride), storage.storage_offset() + offset)


def read_object(path: Path) -> Any:
    """The content of a file.

    Raises ValueError: its content is of another kind, which the message names, or damaged.
    """
    if not path.is_file():
        raise ValueError("not a regular file")
    with path.open("rb") as file:
        head, size = file.read(HEAD), path.stat().st_size
        try:
            if head[:4] == b"PK\x03\x04":
                return _read_zip(path)
            if head[8:9] == b"{":
                return load_file(path)
            if head[:1] == b"\x80":
                file.seek(0)
                return _read_pickle(file, size)
        except Exception as error:  # an unpickler may raise anything for a damaged file
            raise ValueError(f"it is damaged: {type(error).__name__}: {error}") from error
    what = describe(head) if head else "an empty file"
    raise ValueError(f"it is {what.removesuffix(TABLE)}" if what else "neither safetensors nor a file of torch.save")


def _read_zip(path: Path) -> Any:
    """The content of a zip file of torch.save, or of a TorchScript archive, whose code is not looked at."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        roots = [name for name in archive.namelist() if f"/{name}".endswith("/data.pkl")]
        if not roots:
            raise ValueError("a zip archive without data.pkl, which torch.save writes")
        folder = min(roots, key=len).removesuffix("data.pkl")
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

        def record(name: str) -> tuple[int, int]:
            """Where a record begins, and its length."""
            info = archive.getinfo(folder + name)
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError("its records are compressed")
            names = struct.unpack_from("<HH", memory, info.header_offset + 26)
            return info.header_offset + 30 + sum(names), info.file_size

        def storage(key: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
            begin, length = record(f"data/{key}")
            if not 0 <= numel * dtype.itemsize <= length:
                raise ValueError(f"record {key} is too short")
            if not numel:
                return torch.empty(0, dtype=dtype)
            return torch.frombuffer(memory, dtype=dtype, count=numel, offset=begin)

        if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
            raise ValueError("its numbers are big-endian")
        record("data.pkl")
        with archive.open(f"{folder}data.pkl") as pickled:
            return _Unpickler(pickled, storage, len(memory)).load()


def _read_pickle(file: IO[bytes], size: int) -> Any:
    """The content of a file of torch.save before 1.6, whose numbers follow the pickles, or of a plain pickle."""
    flat: dict[str, torch.Tensor] = {}

    def storage(key: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
        if key not in flat:
            if not 0 <= numel * dtype.itemsize <= size - sum(items.nbytes for items in flat.values()):
                raise ValueError("it is too short")
            flat[key] = torch.empty(numel, dtype=dtype)
        return flat[key]

    def load() -> Any:
        return _Unpickler(file, storage, size).load()

    found = load()
    if not isinstance(found, int) or found != LEGACY:
        return found
    load(), load()  # version of the format; sizes of C's types
    found = load()
    for key in map(str, load()):
        items = flat[key].view(torch.uint8).numpy()
        if struct.unpack("<q", file.read(8))[0] != len(flat[key]) or file.readinto(items) != len(items):  # type: ignore[attr-defined]
            raise ValueError("it is too short")
    return found


def plain(value: Any) -> Any:
    """The tensor or number that an `Inert` object of NumPy stands for; any other value as it is.

    Raises ValueError: the array is damaged, or not of numbers.
    """
    if not isinstance(value, Inert) or not value.origin.startswith("numpy"):
        return value
    with errors_as(ValueError, "an array of NumPy cannot be read", TypeError, AttributeError, LookupError, ValueError):
        match value.origin.rpartition(".")[2], value.args, value.state:
            case "scalar", (dtype, data), _:
                shape, fortran = None, False
            case "_reconstruct", _, (_, shape, dtype, fortran, data):
                pass
            case _:
                return value
        code = re.fullmatch(r"[fiu][1248]|b1", str(dtype.args[0]))
        data = data.encode("latin1") if isinstance(data, str) else bytes(data)
        if code is None:
            raise ValueError(f"of type {dtype.args[0]}")
        order: Any = dtype.state[1] if dtype.state else "="
        array = np.frombuffer(data, np.dtype(code[0]).newbyteorder(order))
        array = array.reshape(shape or (), order="F" if fortran else "C")
    return array.item() if shape is None else torch.from_numpy(array.astype(code[0]))


def named_tensors(found: Any, name: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors in nested mappings and modules but those of optimizers, with the path of keys to each as its name.

    Raises ValueError: an array of NumPy is damaged.
    """
    found, seen = plain(found), set() if seen is None else seen
    if isinstance(found, torch.Tensor):
        yield name, found
    elif isinstance(found, dict) and id(found) not in seen:
        seen.add(id(found))
        for key, value in (found.members() if isinstance(found, Inert) else found).items():
            if not str(key).startswith("optim"):
                path = name if key in ("_parameters", "_buffers", "_modules") else f"{name}.{key}".removeprefix(".")
                yield from named_tensors(value, path, seen)


T = TypeVar("T")
SHOWN = 4  # names in a message
# First parts of the names in open_clip's models.
CLIP = {"visual", "text", "transformer", "token_embedding", "positional_embedding", "ln_final", "text_projection"}
CLIP |= {"logit_scale", "logit_bias"}
# Tensors that files hold beside the weights: three of OpenAI's, a mask, and the count of torch's AveragedModel.
NOT_WEIGHTS = {"input_resolution", "context_length", "vocab_size", "attn_mask", "n_averaged"}
# What torch puts into names at any place: compilation, FSDP and checkpointing.
WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
TRANSFORMERS = re.compile(r"(?:vision|text)_model\..*encoder\.layers\.")  # of its CLIPModel and SiglipModel
SHARD = re.compile(r"-\d{5}-of-\d{5}(?=\.)")  # in the name of one of several files of weights
# In names of other projects: whose weights these are.
FOREIGN = {"bert.encoder.": "Chinese-CLIP, which open_clip has no model of",
           "visual.blocks.": "EVA-CLIP: use open_clip's EVA models with their tags"}  # fmt: skip
TEXT_POSITIONS = ("positional_embedding", "text.positional_embedding")
KEPT_POSITIONS = 20  # which are well trained, as most captions are that short
TIMM_POSITIONS, POOL_POSITIONS = "visual.trunk.pos_embed", "visual.attnpool.positional_embedding"


def check_finite(tensors: Iterable[tuple[str, torch.Tensor]], where: Path | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, and check each.

    Raises SettingsError: after the last one, if some are NaN or infinite; names the first of them.
    """
    broken = []
    for name, tensor in tensors:
        if not tensor.isfinite().all():
            broken.append(name)
        yield name, tensor
    if broken:
        advice = "take other weights, as of an earlier checkpoint"
        raise SettingsError(f"{where} holds weights that are NaN or infinite: {listed(broken, SHOWN)}; {advice}")


def weights_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 of tensors, in hexadecimal digits: of their names in order, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        value = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def of_clip(name: str) -> bool:
    """Whether a model of open_clip has parameters whose names begin as this one does."""
    return name.partition(".")[0] in CLIP


def read_weights(
    path: Path, fits: Callable[[str], bool] = of_clip, adapter: Path | None = None
) -> dict[str, torch.Tensor]:
    """The tensors in a file by the model's names, those that `fits`, wherever they are (see `without_prefix`). An
    adapter of peft, by its folder, is added to weights of transformers.

    Raises SettingsError: the file is not a checkpoint of a model of open_clip or timm.
    """
    index = path.with_name(f"{SHARD.sub('', path.name)}.index.json")
    if SHARD.search(path.name) and index.is_file():
        path = index  # of all files, of which this is one
    with errors_as(SettingsError, f"cannot read weights from {path}", OSError, ValueError):
        found = {name: tensor for one in _files(path) for name, tensor in named_tensors(read_object(one))}
    if not found:
        raise SettingsError(f"{path} is not a checkpoint of a model: no tensors by name in it")
    if any(TRANSFORMERS.search(name) for name in found):
        found = without_prefix(found, in_transformers, path)
        if adapter is not None:
            file = adapter / ADAPTER_WEIGHTS
            with errors_as(SettingsError, f"cannot read the adapter {file}", OSError, ValueError):
                found = with_adapter(found, without_prefix(read_object(file), in_transformers, file), adapter)
        return from_transformers(found, path)
    if adapter is not None:
        raise SettingsError(f"{adapter} is an adapter of peft: those on CLIPModel and SiglipModel are read, not {path}")
    taken = without_prefix(found, fits, path)
    taken = {name: tensor for name, tensor in taken.items() if name not in NOT_WEIGHTS}
    for name in TEXT_POSITIONS:  # those of Long-CLIP (its model_longclip.py) have the rest in a second embedding
        if (rest := taken.pop(f"{name}_res", None)) is not None and name in taken:
            taken[name] = torch.cat([taken[name][:KEPT_POSITIONS], rest[KEPT_POSITIONS:]])
    return taken


def _files(path: Path) -> list[Path]:
    """The files of weights that an index of transformers (*.index.json) names; any other file itself.

    Raises ValueError: the index is damaged, or names files of other folders.
    """
    if not path.name.endswith(".index.json"):
        return [path]
    names = json.loads(path.read_text(encoding="utf-8")).get("weight_map", {}).values()
    files = [path.parent / name for name in sorted({str(name) for name in names})]
    if other := next((file for file in files if file.parent != path.parent), None):
        raise ValueError(f"it names the file {other}, which is not beside it")
    if absent := next((file for file in files if not file.is_file()), None):
        raise ValueError(f"its file {absent.name} is missing")
    return files


def without_prefix(found: Mapping[str, T], fits: Callable[[str], bool], path: Path) -> dict[str, T]:
    """The values by name below the prefix after which most names fit, such as `state_dict.module.`, without this
    prefix; below the prefix of all if no name fits. Prefixes of weights without averaging go first.
    """
    names = {WRAPPERS.sub("", name): name for name in found}
    fitting, total = Counter[str](), Counter[str]()
    for name in names:
        for start in (0, *(dot.end() for dot in re.finditer(r"\.", name))):
            total[name[:start]] += 1
            fitting[name[:start]] += fits(name[start:])
    good = [prefix for prefix, count in fitting.items() if count and 2 * count >= total[prefix]]
    most = max((fitting[prefix] for prefix in good), default=0)
    best = sorted((prefix for prefix in good if fitting[prefix] == most), key=lambda prefix: "ema" in prefix.lower())
    common = os.path.commonprefix(list(names))  # noqa: RUF071 (no paths)
    prefix = best[0] if best else common[: common.rfind(".") + 1]
    if left := [name for name in names if not name.startswith(prefix)]:
        logger.warning(f"{path}: the weights are those below {prefix}; {len(left)} others, as {left[0]}, are left out")
    return {name.removeprefix(prefix): found[old] for name, old in names.items() if name.startswith(prefix)}


def stretch_positions(positions: torch.Tensor, length: int) -> torch.Tensor:
    """Position embeddings [T, W] for more tokens, [length, W]: the first KEPT_POSITIONS as they are, the others
    interpolated between, and beyond the last extrapolated (Long-CLIP, arXiv:2403.15378, from 77 to 248).
    """
    old, kept = len(positions), KEPT_POSITIONS
    places = torch.arange(length - kept, dtype=torch.float64) * (old - kept) / (length - kept)
    before = places.floor().long().clamp(max=old - kept - 2)
    share = (places - before).unsqueeze(1)
    rest = positions[kept:].double()
    found = rest[before] * (1 - share) + rest[before + 1] * share
    return torch.cat([positions[:kept], found.to(positions.dtype)])


def load_weights(clip: Any, state: dict[str, torch.Tensor], source: ModelFiles, *, cut: bool = True) -> None:
    """Load a checkpoint's tensors into the model; position embeddings are resampled to its image and text size, those
    of longer texts by `stretch_positions`. With `cut`, the model may have fewer positions of texts than the checkpoint.

    Raises SettingsError: names or shapes differ; names the first of them.
    """
    state = convert_state_dict(clip, state)
    own = clip.state_dict()
    if "positional_embedding" in state and "positional_embedding" not in own:
        # open_clip's own conversion looks for `text_projection`, where SigLIP has a weight and a bias.
        kept = ("visual.", "logit_")
        state = {name if name.startswith(kept) else f"text.{name}": tensor for name, tensor in state.items()}
    # transformers kept a buffer of positions in its checkpoints until 4.31.
    if "text.transformer.embeddings.position_ids" not in own:
        state.pop("text.transformer.embeddings.position_ids", None)
    for name in ("logit_scale", "logit_bias"):
        if name in state and name in own:
            state[name] = state[name].reshape(own[name].shape)
    problems = []
    if own.keys() == state.keys():
        try:
            for name in TEXT_POSITIONS:
                given, length = (len(those[name]) if name in state and name in own else 0 for those in (state, own))
                if given > length and not cut:
                    raise SettingsError(
                        f"{source.weights} is of texts of {given} tokens, {source.label} of {length}: set tokenizer."
                        f"context_length (--force-context-length) to {given}, or to {length} for fewer positions"
                    )
            resample_positions(state, own, clip)
        except (RuntimeError, AssertionError) as error:
            problems.append(f"position embeddings do not fit ({error})")
    _refuse([*problems, *_differences(own, state)], source.weights, source.label)
    clip.load_state_dict(dict(check_finite(state.items(), source.weights)))


def resample_positions(state: dict[str, torch.Tensor], own: Mapping[str, torch.Tensor], clip: Any) -> None:
    """Resample position embeddings of `state` to the image and text size of the model, whose tensors are `own`, those
    of longer texts by `stretch_positions`; other tensors stay.
    """
    resize_pos_embed(state, clip)
    for name in TEXT_POSITIONS:
        if name in state and name in own and len(own[name]) > len(state[name]) > KEPT_POSITIONS + 1:
            state[name] = stretch_positions(state[name], len(own[name]))
    if not hasattr(clip, "text") or hasattr(clip.text, "positional_embedding"):
        resize_text_pos_embed(state, clip)
    if (old := state.get(TIMM_POSITIONS)) is not None and old.shape != own.get(TIMM_POSITIONS, old).shape:
        trunk = clip.visual.trunk
        grid, extra = list(trunk.patch_embed.grid_size), trunk.num_prefix_tokens
        state[TIMM_POSITIONS] = resample_abs_pos_embed(old, grid, num_prefix_tokens=extra)
    if (old := state.get(POOL_POSITIONS)) is not None and old.shape != (new := own.get(POOL_POSITIONS, old)).shape:
        side = math.isqrt(len(new) - 1)
        state[POOL_POSITIONS] = resample_abs_pos_embed(old[None], [side, side], num_prefix_tokens=1)[0]


def fit_positions(name: str, tensor: torch.Tensor, like: torch.Tensor | None, clip: Any) -> torch.Tensor:
    """A tensor that a checkpoint has for the parameter `name`, or a moment of it; resampled to the size of the model's
    parameter, `like`, if it is of position embeddings.
    """
    if like is None or tensor.shape == like.shape or not tensor.ndim:
        return tensor
    state = {name: tensor.float()}
    resample_positions(state, {name: like}, clip)
    # Contiguous, as the fused optimizers pair a parameter with its moments by their place in memory.
    return state[name].to(tensor.dtype).contiguous()


def load_image_weights(trunk: Any, path: Path) -> None:
    """Load a file of timm's names into a timm tower, as timm does: the classifier is left out, and position embeddings
    are resampled.

    Raises SettingsError: names or shapes differ; names the first of them.
    """
    own = trunk.state_dict()
    state = read_weights(path, own.__contains__)
    convert = getattr(sys.modules[type(trunk).__module__], "checkpoint_filter_fn", None)
    if convert is not None and _differences(own, state):
        try:
            state = convert(state, trunk)
        except (KeyError, RuntimeError, AttributeError, TypeError, AssertionError):
            state = dict(state)  # of another tower: the differences are reported below
    heads = trunk.pretrained_cfg.get("classifier") or ()
    heads = (heads,) if isinstance(heads, str) else heads
    state = {name: tensor for name, tensor in state.items() if name in own or name.rpartition(".")[0] not in heads}
    # Files of early versions of torch lack these counts, which only a batch norm without momentum reads.
    state |= {name: own[name] for name in own if name.endswith(".num_batches_tracked") and name not in state}
    _refuse(_differences(own, state), path, f"timm's {trunk.pretrained_cfg.get('architecture')}")
    trunk.load_state_dict(dict(check_finite(state.items(), path)))


def _differences(own: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> list[str]:
    """Names, or else shapes, in which a file's tensors differ from the model's."""
    problems = [f"{name} is missing" for name in own if name not in state]
    problems += [f"{name} is not in the model" for name in state if name not in own]
    return problems or [
        f"{name} is {list(state[name].shape)} in the file and {list(own[name].shape)} in the model"
        for name in own
        if state[name].shape != own[name].shape
    ]


def _refuse(problems: list[str], path: Path | None, label: str) -> None:
    """Raise for a file that does not fit the model, with the first of the problems."""
    if problems:
        kinds = [f" (but of {kind})" for part, kind in FOREIGN.items() if any(part in one for one in problems)]
        head = f"{path} does not hold the weights of {label}{''.join(kinds[:1])}:"
        raise SettingsError(lines(head, *listed_lines([f"  {one}" for one in problems], SHOWN)))
