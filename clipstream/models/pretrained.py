"""The files of a model: configuration, weights, preprocessing and tokenizer, on the Hub or on this machine.

Settings enter; the paths of all files leave, or the files that are missing from the Hub's cache (`look_up`), which are
downloaded (`fetch`). Does not import torch, so that a missing file is reported within a second, and does not contact
the Hub for a file that is in its cache; `build` builds the model.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError

from clipstream.distributed.run_record import require_same
from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError, SettingsError, did_you_mean, errors_as
from clipstream.models.model_config import (
    AVERAGED_FILE,
    CONFIG_FILE,
    HUB,
    LOCAL,
    WEIGHT_FILES,
    Config,
    ModelConfig,
    builtin,
    check_config,
    is_model,
    pretrained_tags,
)
from clipstream.models.settings import ModelSettings
from clipstream.models.transformers_names import base_of
from clipstream.text import lines
from clipstream.utils.atomic_write import checksum

# In the order in which transformers looks for its own; an index names the files of weights in several.
_TRANSFORMERS = tuple(
    f"{name}{index}" for name in ("model.safetensors", "pytorch_model.bin") for index in ("", ".index.json")
)
LOCAL_WEIGHT_FILES = (*WEIGHT_FILES, *_TRANSFORMERS, "model.pth", AVERAGED_FILE)
TOKENIZER_FILES = ("tokenizer.json", "spiece.model", "sentencepiece.bpe.model", "vocab.txt", "vocab.json")
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_EXTRAS = ("special_tokens_map.json", "added_tokens.json", "merges.txt", "config.json")
TEXT_CONFIG, TEXT_WEIGHTS = "config.json", ("model.safetensors", "pytorch_model.bin")  # of a Hugging Face text tower
TOKENIZER_KEYS = ("hf_tokenizer_name", "tokenizer_kwargs", "tokenizer_mode", "context_length")
PREPROCESS_KEYS = ("mean", "std", "interpolation", "resize_mode", "fill_color", "floor_crop")
TIMEOUT = 4.0  # s for the Hub to answer, before a run that needs files from it starts
OPTIONAL = ""  # among the names of a file that a repository may lack
Missing = dict[str, list[tuple[str, ...]]]  # repository -> for each file, its names in order of preference


class TokenizerChoice(Protocol):
    """Settings of a tokenizer, as far as the model depends on them; types 'hub' and 'path' also have a `name`."""

    @property
    def type(self) -> str:
        """model, hub, path, or package.module:Name."""

    @property
    def context_length(self) -> int | None:
        """Tokens per caption; None for the model's own."""


@dataclass(frozen=True)
class ModelFiles:
    """The files to build a model from, on this machine's disk."""

    label: str  # the model's name in messages
    model_cfg: Config  # open_clip's model configuration
    preprocess_cfg: Config  # mean, std, interpolation, …, where they differ from open_clip's defaults
    weights: Path | None  # file of the weights; None for a fresh model
    tokenizer: Path | None  # folder of a Hugging Face tokenizer; None for open_clip's own BPE
    text_model: Path | None  # folder with config.json (and base weights) of a Hugging Face text tower
    image_weights: Path | None = None  # file of a timm tower's weights, beside those of `weights`
    adapter: Path | None = None  # folder of an adapter of peft on `weights`


@dataclass(frozen=True)
class _Weights:
    """A file of weights, and the configuration that comes with it."""

    path: Path | None = None  # None for a fresh model, and where the file is missing
    config: ModelConfig | None = None
    folder: Path | None = None  # of a local file, with the weights' own tokenizer
    local: bool = False
    adapter: Path | None = None  # folder of peft's


def preflight(
    settings: ModelSettings,
    tokenizer: TokenizerChoice | None = None,
    *,
    loss_type: str | None = None,
    teacher: ModelSettings | None = None,
    ask: bool = True,
) -> None:
    """Check, without torch and within seconds, that the files of a model are here or can be downloaded.

    Args:
        loss_type: 'clip' or 'siglip' where the user chose one.
        teacher: a further model, which needs weights.
        ask: whether to check that the Hub can be reached; one process per node is enough.

    Raises SettingsError: a name, tag or file does not exist; tokenizer or loss differ from those of the weights; or
    files are not in the Hub's cache and the Hub cannot be reached.
    """
    found = look_up(settings, tokenizer, loss_type)
    if not isinstance(found, ModelFiles) and ask and (reason := why_unreachable()):
        raise missing_error(found, settings.cache_dir, _label(settings), reason)
    if teacher is not None:
        with errors_as(SettingsError, "distill.model", SettingsError):
            if teacher.is_fresh:
                raise SettingsError(f"{teacher.name} has no weights: set distill.pretrained, or for start --pretrained")
            preflight(teacher, ask=ask)


def fetch(settings: ModelSettings, tokenizer: TokenizerChoice | None, world: World) -> ModelFiles:
    """The files of a model, downloaded into the Hub's cache by one rank per node. Collective; all ranks raise errors.

    Raises SettingsError: as `preflight`, a download failed, or the ranks have different files.
    """
    problem = None
    try:
        # A configuration on the Hub names further files: look again once it is here.
        while world.local_rank == 0 and not isinstance(found := look_up(settings, tokenizer), ModelFiles):
            if reason := why_unreachable():
                raise missing_error(found, settings.cache_dir, _label(settings), reason)
            download(found, settings.cache_dir)
    except (ClipstreamError, OSError) as error:
        problem = str(error)
    for message in world.gather_objects(problem):
        if message:
            raise SettingsError(message)
    files = look_up(settings, tokenizer)
    if not isinstance(files, ModelFiles):
        raise missing_error(files, settings.cache_dir, _label(settings), "this rank does not see downloaded files")
    advice = f"copy those of one host to all, or share the folder ({files.weights or settings.cache_dir or HUB})"
    require_same(world, partial(_contents, files), f"files of {files.label}", advice)
    return files


def _contents(files: ModelFiles) -> dict[str, object]:
    """The values of a model's configuration, and the checksums of its files, by name; 0.4 s a GB."""
    values: dict[str, object] = {"preprocess_cfg": files.preprocess_cfg}
    for key, value in files.model_cfg.items():
        values |= {f"{key}.{name}": one for name, one in value.items()} if isinstance(value, dict) else {key: value}
    parts, indexed = vars(files), files.weights is not None and files.weights.suffix == ".json"
    texts, of_weights = (*TOKENIZER_FILES, TOKENIZER_CONFIG, *TOKENIZER_EXTRAS, "*.py"), ("*.safetensors", "*.bin")
    base = () if files.weights else of_weights
    wanted: dict[str, tuple[str, ...]] = {"weights": of_weights if indexed else (), "image_weights": ()}
    wanted |= {"tokenizer": texts, "text_model": (TEXT_CONFIG, *base), "adapter": ("*.json", *of_weights)}
    for part, patterns in wanted.items():
        if (path := parts[part]) is not None:
            folder = path.parent if path.is_file() else path
            found = {path, *(one for pattern in patterns for one in folder.glob(pattern))}
            values |= {f"{part} {one.name}": checksum(one) for one in sorted(found) if one.is_file()}
    return values


def look_up(
    settings: ModelSettings, tokenizer: TokenizerChoice | None = None, loss_type: str | None = None
) -> ModelFiles | Missing:
    """The paths of a model's files on this machine, or the files that are missing from the Hub's cache. Those that a
    configuration names are unknown until it is in the cache. Uses no network.

    Raises SettingsError: a name, tag or local file does not exist; or tokenizer or loss differ from those of the
    weights.
    """
    cache, label = HubCache(settings.cache_dir), _label(settings)
    weights = _weights(settings, cache)
    config = _config(settings, weights, cache)
    if config is None:
        return cache.missing
    text_cfg, fresh = config.model_cfg["text_cfg"], settings.is_fresh
    if loss_type is not None and not weights.local:  # `build` reads the loss of local weights from their tensors
        published = "siglip" if config.model_cfg.get("init_logit_bias") is not None else "clip"
        resolve_loss(settings, loss_type, config.model_cfg, weights_for=None if fresh else published)
    folder = _tokenizer(settings, tokenizer, text_cfg, weights, cache)
    text_model = _text_model(settings, text_cfg, weights, cache)
    image_weights = _image_weights(settings, config.model_cfg["vision_cfg"], cache)
    if cache.missing:
        return cache.missing
    files = (weights.path, folder, text_model, image_weights, weights.adapter)
    return ModelFiles(label, config.model_cfg, config.preprocess_cfg, *files)


def _config(settings: ModelSettings, weights: _Weights, cache: HubCache) -> ModelConfig | None:
    """The configuration that `model.name` names, with preprocessing, activation and tokenizer of the weights.

    Values in a user's own configuration file take precedence over those of the weights. None if one of the two
    configurations is missing.
    """
    name, own = settings.name, _is_own(settings)
    if settings.config is not None:
        if name.startswith((HUB, LOCAL)):
            raise SettingsError(f"model.config and the configuration of {name} are mutually exclusive")
        config = ModelConfig.of(settings.config, "model.config")
    elif name.startswith(HUB):
        path = cache.find(name[len(HUB) :], (CONFIG_FILE,))
        if path is None:
            return None
        config = ModelConfig.read(path)
    elif name.startswith(LOCAL):
        config = ModelConfig.beside(Path(name[len(LOCAL) :]))
    else:
        config = ModelConfig.read(Path(name)) if own else ModelConfig(builtin(_open_clip_name(name)), {})
    if weights.config is None and (settings.pretrained or "").startswith(HUB):
        return None
    model_cfg, preprocess = deepcopy(config.model_cfg), _preprocess_only(config)
    if (theirs := weights.config) is not None:
        if theirs.model_cfg:
            _override(model_cfg, theirs.model_cfg, ("quick_gelu",), keep=own)
            _override(model_cfg["text_cfg"], theirs.model_cfg["text_cfg"], TOKENIZER_KEYS, keep=own)
        other = _preprocess_only(theirs)
        preprocess = {**other, **preprocess} if own else {**preprocess, **other}
    model_cfg |= {key: True for key in ("quick_gelu", "custom_text") if getattr(settings, key)}
    check_config(_label(settings), model_cfg, settings.image_size)
    return ModelConfig(model_cfg, preprocess)


def _override(mine: Config, theirs: Config, keys: tuple[str, ...], *, keep: bool) -> None:
    """Copy `keys` from `theirs` to `mine`, in place; with `keep`, only those that `mine` lacks."""
    for key in keys:
        if key in theirs and not (keep and key in mine):
            mine[key] = theirs[key]
        elif not keep:
            mine.pop(key, None)


def _label(settings: ModelSettings) -> str:
    return f"model {settings.name}" + (f" with {settings.pretrained}" if settings.pretrained else "")


def _open_clip_name(name: str) -> str:
    return name if name.startswith((".", "/")) else name.replace("/", "-")


def _is_own(settings: ModelSettings) -> bool:
    """Whether the configuration is a user's file, or its content in the settings."""
    name = settings.name
    own = settings.config is not None or name.endswith(".json") or Path(name).is_file()
    return own and not name.startswith((HUB, LOCAL))


def _preprocess_only(config: ModelConfig) -> Config:
    values = config.preprocess_cfg
    return {key: values[key] for key in PREPROCESS_KEYS if values.get(key) is not None}


def _weights(settings: ModelSettings, cache: HubCache) -> _Weights:
    """The weights of `settings`."""
    name, own = settings.name, None
    if name.startswith(LOCAL):
        own = Path(name[len(LOCAL) :])
    chosen = settings.pretrained or (name if name.startswith((HUB, LOCAL)) else None)
    if chosen is None:
        return _Weights()
    if chosen.startswith(HUB):
        file = cache.find(chosen[len(HUB) :], (CONFIG_FILE,))
        path = cache.find(chosen[len(HUB) :], WEIGHT_FILES)
        return _Weights(path, None if file is None else ModelConfig.read(file), own)
    if chosen.startswith(LOCAL):
        given = Path(chosen[len(LOCAL) :])
        config, folder = ModelConfig.beside(given), base_of(given)
        path = next((folder / file for file in LOCAL_WEIGHT_FILES if (folder / file).is_file()), None)
        if path is None:
            raise SettingsError(f"{chosen} has no weights: {folder} holds none of {', '.join(LOCAL_WEIGHT_FILES)}")
        adapter = None if folder == given else given
        words = own if settings.pretrained is None and not adapter else _with_tokenizer(folder)
        return _Weights(path, config, _with_tokenizer(given) or words, True, adapter)
    # As in open_clip.add_model_config, a configuration file goes by its stem: its tags are those of that name.
    known = Path(name).stem if _is_own(settings) else _open_clip_name(name)
    tags = [] if name.startswith((HUB, LOCAL)) else pretrained_tags().list_pretrained_tags_by_model(known)
    if tags and (entry := pretrained_tags().get_pretrained_cfg(known, chosen)):
        if not entry.get("hf_hub"):
            raise SettingsError(f"tag {chosen!r} is not on the Hub: download {entry.get('url')} and use its path")
        repo, _, given = entry["hf_hub"].rpartition("/")
        names = (str(Path(given).with_suffix(".safetensors")), given) if given else WEIGHT_FILES
        # A tag's entry says nothing of the tokenizer: that is the model's of this name.
        quick = {**builtin(known), "quick_gelu": True} if entry.get("quick_gelu") else {}
        return _Weights(cache.find(repo, names), ModelConfig(quick, entry))
    path = Path(chosen)
    if not path.is_file():
        listed = f"tags of {known}: {', '.join(tags)}" if tags else f"{name} has no tags"
        near = did_you_mean(chosen, tags, 3)
        raise SettingsError(f"model.pretrained {chosen!r} is neither a tag nor a file; {listed}{near}")
    told = path.name in LOCAL_WEIGHT_FILES and is_model(path.parent)
    return _Weights(path, ModelConfig.beside(path.parent) if told else None, _with_tokenizer(path.parent), local=True)


def _with_tokenizer(folder: Path) -> Path | None:
    return folder if any((folder / file).is_file() for file in TOKENIZER_FILES) else None


def resolve_loss(settings: ModelSettings, wanted: str | None, model_cfg: Config, *, weights_for: str | None) -> str:
    """The type of loss to train with: the user's choice, else the configuration's, else that of the weights.

    Args:
        wanted: the user's choice.
        model_cfg: open_clip's configuration; init_logit_bias marks a siglip model.
        weights_for: the loss that the weights were trained with; None for a fresh model, which may become either.

    Raises SettingsError: weights or configuration are made for another loss, and `allow_mismatch` is not set.
    """
    by_config = "siglip" if model_cfg.get("init_logit_bias") is not None else None
    chosen = wanted or by_config or weights_for or "clip"
    made_for = weights_for or by_config or "clip"
    fresh_clip = weights_for is None and made_for == "clip"
    if chosen != made_for and not fresh_clip and not settings.allow_mismatch:
        asked = f"loss.type is {wanted!r}" if wanted else "its configuration has init_logit_bias"
        advice = "leave loss.type at 'auto', or set model.allow_mismatch to true"
        raise SettingsError(f"{_label(settings)} was made for the {made_for!r} loss, but {asked}: {advice}")
    return chosen


def _tokenizer(
    settings: ModelSettings, tokenizer: TokenizerChoice | None, text_cfg: Config, weights: _Weights, cache: HubCache
) -> Path | None:
    """The folder of a Hugging Face tokenizer; None for open_clip's own or a user's class, or if files are missing.

    `text_cfg` is changed to name this tokenizer.

    Raises SettingsError: the folder holds no tokenizer, or the weights were trained with another one.
    """
    own = text_cfg.get("hf_tokenizer_name")
    kind, name = ("model", "") if tokenizer is None else (tokenizer.type, str(getattr(tokenizer, "name", "")))
    if kind != "model" and not (own and name == own) and not settings.is_fresh and not settings.allow_mismatch:
        raise SettingsError(
            f"the weights of {_label(settings)} were trained with the model's own tokenizer "
            f"({own or 'the BPE of CLIP'}), not with tokenizer.type {kind!r}: leave tokenizer.type at 'model', or set "
            "model.allow_mismatch to true"
        )
    if tokenizer is not None and tokenizer.context_length is not None:
        text_cfg["context_length"] = tokenizer.context_length
    if kind in ("hub", "path") and name != own:
        # open_clip reads the files beside a saved configuration whatever the name: a path of this machine stays out.
        text_cfg["hf_tokenizer_name"] = name if kind == "hub" else "tokenizer"
        text_cfg.pop("tokenizer_kwargs", None)
        text_cfg.pop("tokenizer_mode", None)
    folder = None
    if kind == "path":
        folder = Path(name).parent if Path(name).is_file() else Path(name)
    elif kind == "model" and own:
        name = own
        folder = weights.folder or (Path(settings.text_model) if settings.text_model else None)
        folder = folder or (Path(own) if Path(own).is_dir() else None)
    elif kind != "hub":
        return None
    if folder is not None:
        if _with_tokenizer(folder) is None:
            names = ", ".join(TOKENIZER_FILES)
            hint = "" if kind == "path" else "; copy them from the model that this one was tuned from"
            raise SettingsError(f"no tokenizer in {folder}: none of {names} exists{hint}")
        return folder
    path = cache.find(name, TOKENIZER_FILES, (TOKENIZER_CONFIG,), extras=TOKENIZER_EXTRAS)
    config = None if path is None else path.parent / TOKENIZER_CONFIG
    if config is not None and config.is_file() and getattr(tokenizer, "trust_remote_code", False):
        auto_map = json.loads(config.read_text(encoding="utf-8")).get("auto_map", {})
        named = auto_map.get("AutoTokenizer", []) if isinstance(auto_map, dict) else auto_map
        modules = [named] if isinstance(named, str) else [module for module in named if module]
        cache.find(name, *((f"{module.rpartition('.')[0]}.py",) for module in modules if "--" not in module))
    return None if path is None else path.parent


def _text_model(settings: ModelSettings, text_cfg: Config, weights: _Weights, cache: HubCache) -> Path | None:
    """The folder of a Hugging Face text tower; None for open_clip's own, or if files are missing."""
    name = text_cfg.get("hf_model_name")
    if settings.text_model is not None and not name:
        raise SettingsError(
            f"model.text_model: the text tower of {_label(settings)} is open_clip's own; choose a model whose text_cfg "
            "has hf_model_name, such as lite0-minilm"
        )
    if not name:
        return None
    base = settings.is_fresh and text_cfg.get("hf_model_pretrained", True)  # whether the folder needs weights
    if settings.text_model is not None:
        folder = Path(settings.text_model)
    elif weights.folder is not None and (weights.folder / TEXT_CONFIG).is_file():
        folder = weights.folder
    elif Path(name).is_dir():
        folder = Path(name)
    else:
        path = cache.find(name, (TEXT_CONFIG,), *((TEXT_WEIGHTS,) if base else ()))
        return None if path is None else path.parent
    if not (folder / TEXT_CONFIG).is_file():
        raise SettingsError(f"{folder} holds no Hugging Face text tower: there is no {TEXT_CONFIG}")
    wanted = [*TEXT_WEIGHTS, *(f"{file}.index.json" for file in TEXT_WEIGHTS)]  # the latter list several files
    if base and not any((folder / file).is_file() for file in wanted):
        raise SettingsError(f"{folder} holds no weights of a text tower: none of {', '.join(TEXT_WEIGHTS)} is there")
    return folder


def _image_weights(settings: ModelSettings, vision_cfg: Config, cache: HubCache) -> Path | None:
    """The file of `model.image_pretrained`; None without one, or if it is missing."""
    chosen, name = settings.image_pretrained, str(vision_cfg.get("timm_model_name") or "")
    if chosen is None:
        return None
    if not name:
        what = f"the image tower of {_label(settings)} is open_clip's own"
        raise SettingsError(f"model.image_pretrained: {what}; choose a model whose vision_cfg has timm_model_name")
    if Path(chosen).is_file():
        return Path(chosen)
    entry = timm_entry(name, chosen)
    if entry is None:
        import timm

        tags = [one.partition(".")[2] for one in timm.list_pretrained(f"{name.partition('.')[0]}.*")]
        known = f"tags of {name}: {', '.join(tags) or 'none'}{did_you_mean(chosen, tags, 3)}"
        raise SettingsError(f"model.image_pretrained {chosen!r} is neither a file nor a tag; {known}")
    if not entry.hf_hub_id:
        raise SettingsError(f"tag {chosen!r} of {name} is not on the Hub: download {entry.url} and use its path")
    return cache.find(entry.hf_hub_id, (entry.hf_hub_filename,) if entry.hf_hub_filename else TEXT_WEIGHTS)


def timm_entry(name: str, chosen: str) -> Any:
    """timm's PretrainedCfg of a tower with that tag, or its default one; None without such weights. Imports torch."""
    import timm

    base = name.partition(".")[0]
    wanted = name if chosen == "default" else f"{base}.{chosen}"
    known = timm.is_model(base) and (chosen == "default" or wanted in timm.list_pretrained(f"{base}.*"))
    entry = timm.get_pretrained_cfg(wanted) if known else None
    return entry if entry is not None and entry.has_weights else None


@dataclass
class HubCache:
    """The Hub's cache, and the files that were looked for in vain."""

    folder: str | None  # see `cache_folder`
    missing: Missing = field(default_factory=dict)

    def find(self, repo: str, *files: tuple[str, ...], extras: tuple[str, ...] = ()) -> Path | None:
        """Path of the first of `files`; None if it is not in the cache. Missing files are added to `missing`.

        Args:
            repo: 'ORG/NAME' or 'ORG/NAME@REVISION' (branch, tag or commit).
            files: for each file, its alternative names in order of preference.
            extras: names of files that are downloaded together with missing ones if the repository has them.

        Raises SettingsError: `repo` is not a valid name of a repository.
        """
        paths = [self._find_cached(repo, names) for names in files]
        if absent := [names for names, path in zip(files, paths, strict=True) if path is None]:
            listed = self.missing.setdefault(repo, [])
            wanted = (*absent, *((name, OPTIONAL) for name in extras))
            listed.extend(names for names in wanted if names not in listed)
        return paths[0] if paths else None

    def _find_cached(self, repo: str, names: Iterable[str]) -> Path | None:
        repo_id, revision = _parts(repo)
        for name in names:
            with errors_as(SettingsError, f"{repo!r} is not a repository of the Hugging Face Hub", HFValidationError):
                path = try_to_load_from_cache(repo_id, name, cache_dir=cache_folder(self.folder), revision=revision)
            if isinstance(path, str):
                return Path(path)
        return None


def cache_folder(folder: str | None) -> Path:
    """The Hub's cache: `folder`, else $HF_HUB_CACHE, else the one in the user's home."""
    return Path(folder or constants.HF_HUB_CACHE)


def _parts(repo: str) -> tuple[str, str | None]:
    """Split 'ORG/NAME@REVISION'; without a revision it is None, the branch main."""
    name, _, revision = repo.partition("@")
    return name, revision or None


def why_unreachable() -> str | None:
    """Why the Hub cannot be reached; None if it answers within `TIMEOUT`. Tries once."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        with urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=TIMEOUT):
            return None
    except urllib.error.HTTPError:
        return None  # any answer will do
    except (OSError, ValueError) as error:
        return f"{constants.ENDPOINT} cannot be reached ({getattr(error, 'reason', error)})"


def missing_error(missing: Missing, folder: str | None, label: str, reason: str) -> SettingsError:
    """The error for missing files while the Hub cannot be reached: which files, the folder that was searched, and the
    command that downloads them.
    """
    told = [f"{label} requires files of the Hugging Face Hub that are not in its cache, and {reason}."]
    for repo, files in missing.items():
        repo_id, revision = _parts(repo)
        needed = [names for names in files if OPTIONAL not in names]
        whole = any("open_clip_config.json" in names for names in needed)  # which may name more files
        words = ["hf download", repo_id, *([] if whole else [names[0] for names in needed])]
        words += ["--revision", revision] if revision else []
        words += ["--cache-dir", folder] if folder else []
        told += [
            f"  repository: {repo}",
            f"  files:      {', '.join(' or '.join(names) for names in needed)}",
            f"  looked in:  {cache_folder(folder) / f'models--{repo_id}'.replace('/', '--')}",
            f"  to download them: {' '.join(words)}",
        ]
    told.append("to train without a network: leave --pretrained out, and set --model small-vit")
    return SettingsError(lines(*told))


def download(missing: Missing, folder: str | None) -> None:
    """Download files into the cache, each under the first of its names that the repository has.

    Raises SettingsError: there is no such repository or file, access is denied, or the network failed.
    """
    for repo, files in missing.items():
        for names in files:
            if not any(name == OPTIONAL or _download(repo, name, folder) for name in names):
                raise SettingsError(f"the Hub's repository {repo!r} has no {' or '.join(names)}")


def _download(repo: str, name: str, folder: str | None) -> bool:
    """Download a file into the cache; returns whether the repository has it."""
    repo_id, revision = _parts(repo)
    try:
        hf_hub_download(repo_id, name, cache_dir=cache_folder(folder), revision=revision)
    except Exception as error:  # the client's network errors have no common base
        cause: BaseException = error
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return False
        while isinstance(error, LocalEntryNotFoundError) and (inner := cause.__cause__ or cause.__context__):
            cause = inner  # the network's error
        text = " ".join(str(cause).split()) or type(cause).__name__
        advice = "Rerun the same command to continue the download. Private and gated repositories need `hf auth login`."
        said = f"cannot download {name} of {repo!r} from {constants.ENDPOINT}: {text}"
        raise SettingsError(lines(said, advice)) from error
    return True
