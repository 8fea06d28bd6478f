"""The files of a model: configuration, weights, preprocessing and tokenizer, on the Hub or on this machine.

Settings enter; the list of missing files (`needs`) or the paths of all files (`ModelFiles`) leave. Does not import
torch, so that a missing file is reported within a second; `towers` builds the model.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from clipstream.distributed.world import World
from clipstream.errors import ClipstreamError, SettingsError, did_you_mean
from clipstream.models import hub
from clipstream.models.hub import Need
from clipstream.models.model_config import (
    HUB,
    LOCAL,
    Config,
    ModelConfig,
    builtin,
    check_sizes,
    pretrained_tags,
    refuse,
)
from clipstream.models.settings import ModelSettings

CONFIG_FILE = "open_clip_config.json"
WEIGHT_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
AVERAGED_FILE = "averaged.safetensors"  # of a checkpoint, beside its trained weights
LOCAL_WEIGHT_FILES = (*WEIGHT_FILES, "model.safetensors", "pytorch_model.bin", "model.pth", AVERAGED_FILE)
TOKENIZER_FILES = ("tokenizer.json", "spiece.model", "sentencepiece.bpe.model", "vocab.txt", "vocab.json")
TOKENIZER_EXTRAS = ("special_tokens_map.json", "added_tokens.json", "merges.txt", "config.json")
TEXT_CONFIG, TEXT_WEIGHTS = "config.json", ("model.safetensors", "pytorch_model.bin")  # of a Hugging Face text tower
TOKENIZER_KEYS = ("hf_tokenizer_name", "tokenizer_kwargs", "tokenizer_mode", "context_length")
PREPROCESS_KEYS = ("mean", "std", "interpolation", "resize_mode", "fill_color")


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

    label: str  # its name in messages
    model_cfg: Config  # open_clip's model configuration
    preprocess_cfg: Config  # mean, std, interpolation, …, where they differ from open_clip's defaults
    weights: Path | None  # file of the weights; None for a fresh model
    tokenizer: Path | None  # folder of a Hugging Face tokenizer; None for open_clip's own BPE
    text_model: Path | None  # folder with config.json (and base weights) of a Hugging Face text tower
    image_weights: Path | None = None  # file of a timm tower's weights, beside those of `weights`


@dataclass(frozen=True)
class _Weights:
    """The source of weights: one of `names` in a repository, or a local `path`; neither for a fresh model."""

    repo: str = ""
    names: tuple[str, ...] = ()
    path: Path | None = None
    preprocess: Config | None = None
    model_cfg: Config | None = None

    @property
    def fresh(self) -> bool:
        """Whether the model starts without weights."""
        return not self.repo and self.path is None


def preflight(
    settings: ModelSettings,
    tokenizer: TokenizerChoice | None = None,
    *,
    loss_type: str | None = None,
    ask: bool = True,
) -> None:
    """Check, without torch and within seconds, that the model's files are here or can be downloaded.

    Args:
        loss_type: 'clip' or 'siglip' where the user chose one.
        ask: whether to check that the Hub can be reached; one process per node is enough.

    Raises SettingsError: a name, tag or file is unknown; tokenizer or loss are not those that the weights were made
    with; or files are not in the Hub's cache and the Hub cannot be reached.
    """
    missing = hub.missing(needs(settings, tokenizer, loss_type), settings.cache_dir)
    if ask and missing and (reason := hub.why_unreachable()):
        raise hub.explain(missing, settings.cache_dir, _label(settings), reason)


def preflight_teacher(
    settings: ModelSettings,
    where: str = "distill.model: the teacher",
    advice: str = "give --distill-pretrained as well",
    *,
    fresh: bool = False,
    ask: bool = True,
) -> None:
    """`preflight` of a teacher, which needs weights.

    Args:
        where, advice: the beginning of an error, and what to do where weights are missing.
        fresh: whether it may lack weights.

    Raises SettingsError: as `preflight`, or the teacher has no weights.
    """
    try:
        if not fresh and _weights(settings).fresh:
            raise SettingsError(f"{settings.name} has no weights: {advice}")
        preflight(settings, ask=ask)
    except SettingsError as error:
        raise SettingsError(f"{where}: {error}") from error


def fetch(settings: ModelSettings, tokenizer: TokenizerChoice | None, world: World) -> None:
    """Download the model's files into the Hub's cache, by one rank per node. Collective; errors are raised on all.

    Raises SettingsError: as `preflight`, or a download failed.
    """
    problem = None
    if world.local_rank == 0:
        try:
            # A configuration on the Hub names further files: ask again when it is here.
            while missing := hub.missing(needs(settings, tokenizer), settings.cache_dir):
                if reason := hub.why_unreachable():
                    raise hub.explain(missing, settings.cache_dir, _label(settings), reason)
                hub.download(missing, settings.cache_dir)
        except (ClipstreamError, OSError) as error:
            problem = str(error)
    for message in world.gather_objects(problem):
        if message:
            raise SettingsError(message)


def needs(
    settings: ModelSettings, tokenizer: TokenizerChoice | None = None, loss_type: str | None = None
) -> list[Need]:
    """The files that a model needs from the Hub. Those named by a configuration are unknown until it is in the cache.

    Raises SettingsError: a name, tag or local file does not exist; or tokenizer or loss belong to another model.
    """
    found = []
    if settings.name.startswith(HUB):
        found.append(Need(hub.repository(settings.name), ((CONFIG_FILE,),)))
    weights = _weights(settings)
    if weights.repo:
        config = ((CONFIG_FILE,),) if (settings.pretrained or "").startswith(HUB) else ()
        found.append(Need(weights.repo, (*config, weights.names)))
    merged = _resolved_config(settings, weights)
    if merged is None:
        return found
    text_cfg = merged.model_cfg["text_cfg"]
    if loss_type is not None and weights.path is None:  # local weights are checked by `towers`, which reads them
        published = "siglip" if merged.model_cfg.get("init_logit_bias") is not None else "clip"
        resolve_loss(settings, loss_type, merged.model_cfg, weights_for=None if weights.fresh else published)
    own = text_cfg.get("hf_tokenizer_name")
    chosen = tokenizer is not None and tokenizer.type != "model" and not (own and getattr(tokenizer, "name", "") == own)
    if tokenizer is not None and chosen and not weights.fresh and not settings.allow_mismatch:
        raise SettingsError(
            f"the weights of {_label(settings)} were trained with the model's own tokenizer "
            f"({own or 'the BPE of CLIP'}), not with tokenizer.type {tokenizer.type!r}: leave tokenizer.type at "
            "'model', or set model.allow_mismatch to true"
        )
    repo = _tokenizer_repo(settings, tokenizer, text_cfg)
    if isinstance(repo, str):
        found.append(Need(repo, (TOKENIZER_FILES, ("tokenizer_config.json",)), TOKENIZER_EXTRAS))
        if getattr(tokenizer, "trust_remote_code", False):
            found.append(Need(repo, _code_files(repo, settings.cache_dir)))
    base = weights.fresh and text_cfg.get("hf_model_pretrained", True)
    text_model = _text_model(settings, text_cfg, base=base)
    if isinstance(text_model, str):
        found.append(Need(text_model, ((TEXT_CONFIG,), *((TEXT_WEIGHTS,) if base else ()))))
    image = _image_weights(settings, merged.model_cfg["vision_cfg"])
    return [*found, image] if isinstance(image, Need) else found


def resolve(settings: ModelSettings, tokenizer: TokenizerChoice | None = None) -> ModelFiles:
    """The paths of all files on this machine; uses no network.

    Raises SettingsError: as `preflight`, and for files that are not downloaded yet (`fetch`).
    """
    cache, label = settings.cache_dir, _label(settings)
    if missing := hub.missing(needs(settings, tokenizer), cache):
        raise hub.explain(missing, cache, label, "they were not fetched")
    weights = _weights(settings)
    config = _resolved_config(settings, weights)
    assert config is not None, "needs() names a configuration that is not in the cache"
    path = hub.cached(weights.repo, weights.names, cache) if weights.repo else weights.path
    text_cfg = config.model_cfg["text_cfg"]
    repo = _tokenizer_repo(settings, tokenizer, text_cfg)
    folder = _parent(hub.cached(repo, TOKENIZER_FILES, cache)) if isinstance(repo, str) else repo
    if tokenizer is not None and tokenizer.context_length is not None:
        text_cfg["context_length"] = tokenizer.context_length
    if tokenizer is not None and tokenizer.type in ("hub", "path"):
        name = getattr(tokenizer, "name", None)
        if name != text_cfg.get("hf_tokenizer_name"):
            # open_clip reads the files beside a saved configuration whatever the name: a path of this machine stays
            # out.
            text_cfg["hf_tokenizer_name"] = name if tokenizer.type == "hub" else "tokenizer"
            text_cfg.pop("tokenizer_kwargs", None)
            text_cfg.pop("tokenizer_mode", None)
    text = _text_model(settings, text_cfg)
    text_model = _parent(hub.cached(text, (TEXT_CONFIG,), cache)) if isinstance(text, str) else text
    image = _image_weights(settings, config.model_cfg["vision_cfg"])
    image_file = hub.cached(image.repo, image.files[0], cache) if isinstance(image, Need) else image
    return ModelFiles(label, config.model_cfg, config.preprocess_cfg, path, folder, text_model, image_file)


def _resolved_config(settings: ModelSettings, weights: _Weights) -> ModelConfig | None:
    """The configuration that `model.name` names, with preprocessing, activation and tokenizer of the weights.

    Values in a user's own configuration file take precedence over those of the weights. None while one of the two
    configurations is on the Hub and not in the cache.
    """
    name, own, cache = settings.name, is_own(settings), settings.cache_dir
    if settings.config is not None:
        if name.startswith((HUB, LOCAL)):
            raise SettingsError(f"model.config: model.name {name} has a configuration of its own: give one of the two")
        config = ModelConfig.of(settings.config, "model.config")
    elif name.startswith(HUB):
        path = hub.cached(hub.repository(name), (CONFIG_FILE,), cache)
        if path is None:
            return None
        config = ModelConfig.read(path)
    elif name.startswith(LOCAL):
        config = ModelConfig.read(Path(name[len(LOCAL) :]) / CONFIG_FILE)
    else:
        config = ModelConfig.read(Path(name)) if own else ModelConfig(builtin(name.replace("/", "-")), {})
    refuse(name, config.model_cfg)
    model_cfg, preprocess = deepcopy(config.model_cfg), _preprocess_only(config.preprocess_cfg)
    theirs, their_preprocess = weights.model_cfg, weights.preprocess
    if weights.repo and (settings.pretrained or "").startswith(HUB):
        file = hub.cached(weights.repo, (CONFIG_FILE,), cache)
        if file is None:
            return None
        found = ModelConfig.read(file)
        theirs, their_preprocess = found.model_cfg, found.preprocess_cfg
    if theirs is not None:
        _override(model_cfg, theirs, ("quick_gelu",), keep=own)
        _override(model_cfg["text_cfg"], theirs.get("text_cfg", {}), TOKENIZER_KEYS, keep=own)
    model_cfg |= {key: True for key in ("quick_gelu", "custom_text") if getattr(settings, key)}
    check_sizes(_label(settings), model_cfg, settings.image_size)
    other = _preprocess_only(their_preprocess or {})
    return ModelConfig(model_cfg, {**other, **preprocess} if own else {**preprocess, **other})


def _override(mine: Config, theirs: Config, keys: tuple[str, ...], *, keep: bool) -> None:
    """Copy `keys` from `theirs` to `mine`, in place; with `keep`, only those that `mine` lacks."""
    for key in keys:
        if keep and key in mine:
            continue
        if key in theirs:
            mine[key] = theirs[key]
        else:
            mine.pop(key, None)


def _label(settings: ModelSettings) -> str:
    return f"model {settings.name}" + (f" with {settings.pretrained}" if settings.pretrained else "")


def is_own(settings: ModelSettings) -> bool:
    """Whether the configuration is a user's file, or its content in the settings."""
    name = settings.name
    if name.startswith((HUB, LOCAL)):
        return False
    return settings.config is not None or name.endswith(".json") or Path(name).is_file()


def _preprocess_only(config: Config) -> Config:
    return {key: config[key] for key in PREPROCESS_KEYS if config.get(key) is not None}


def _parent(path: Path | None) -> Path | None:
    return None if path is None else path.parent


def _weights(settings: ModelSettings) -> _Weights:
    """The source of the weights of `settings`.

    Raises SettingsError: an unknown tag, a folder without weights, a missing file.
    """
    name, chosen = settings.name, settings.pretrained
    if chosen is None:
        if not name.startswith((HUB, LOCAL)):
            return _Weights()
        chosen = name
    if chosen.startswith(HUB):
        return _Weights(repo=hub.repository(chosen), names=WEIGHT_FILES)
    if chosen.startswith(LOCAL):
        folder = Path(chosen[len(LOCAL) :])
        config = ModelConfig.read(folder / CONFIG_FILE)
        path = next((folder / file for file in LOCAL_WEIGHT_FILES if (folder / file).is_file()), None)
        if path is None:
            raise SettingsError(
                f"{chosen} has no weights: {folder} holds none of {', '.join(LOCAL_WEIGHT_FILES)}; to start fresh, "
                f"give the path of its {CONFIG_FILE} as model.name"
            )
        return _Weights(path=path, preprocess=config.preprocess_cfg, model_cfg=config.model_cfg)
    # As in open_clip.add_model_config, a configuration file goes by its stem: its tags are those of that name.
    known = Path(name).stem if is_own(settings) else name.replace("/", "-")
    tags = [] if name.startswith((HUB, LOCAL)) else pretrained_tags().list_pretrained_tags_by_model(known)
    entry = pretrained_tags().get_pretrained_cfg(known, chosen) if tags else {}
    if entry:
        if not entry.get("hf_hub"):
            raise SettingsError(f"tag {chosen!r} is not on the Hub: fetch {entry.get('url')} and give the file's path")
        repo, _, file = entry["hf_hub"].rpartition("/")
        names = (str(Path(file).with_suffix(".safetensors")), file) if file else WEIGHT_FILES
        # A tag's entry says nothing of the tokenizer: that is the model's of this name.
        own = {**builtin(known), "quick_gelu": True} if entry.get("quick_gelu") else None
        return _Weights(repo=repo, names=names, preprocess=entry, model_cfg=own)
    if Path(chosen).is_dir():
        raise SettingsError(f"model.pretrained {chosen!r} is a folder: write {LOCAL}{chosen}, or name the file in it")
    if not Path(chosen).is_file():
        near = did_you_mean(chosen, tags, 3)
        listed = f"tags of {known}: {', '.join(tags)}" if tags else f"{name} has no tags"
        raise SettingsError(f"model.pretrained {chosen!r} is neither a tag nor a file; {listed}{near}")
    beside = Path(chosen).parent / CONFIG_FILE
    if Path(chosen).name not in LOCAL_WEIGHT_FILES or not beside.is_file():
        return _Weights(path=Path(chosen))
    config = ModelConfig.read(beside)
    return _Weights(path=Path(chosen), preprocess=config.preprocess_cfg, model_cfg=config.model_cfg)


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
        asked = f"loss.type {wanted!r} was asked for" if wanted else "its configuration has init_logit_bias"
        raise SettingsError(
            f"{_label(settings)} was made for the {made_for!r} loss, but {asked}: leave loss.type at 'auto', "
            "or set model.allow_mismatch to true"
        )
    return chosen


def _text_model(settings: ModelSettings, text_cfg: Config, *, base: bool = False) -> str | Path | None:
    """The repository on the Hub, or the local folder, of a Hugging Face text tower; None for open_clip's own.

    Args:
        base: whether the folder needs weights.

    Raises SettingsError: the folder lacks a file, or the model has another text tower.
    """
    name, own = text_cfg.get("hf_model_name"), _own_folder(settings)
    if settings.text_model is not None and not name:
        raise SettingsError(
            f"model.text_model: the text tower of {_label(settings)} is open_clip's own: take a model whose text_cfg "
            "has hf_model_name, such as configs/models/lite0-minilm.json"
        )
    if not name:
        return None
    if settings.text_model is not None:
        folder = Path(settings.text_model)
    elif own is not None and (own / TEXT_CONFIG).is_file():
        folder = own
    elif Path(name).is_dir():
        folder = Path(name)
    else:
        return str(name)
    if not (folder / TEXT_CONFIG).is_file():
        raise SettingsError(f"{folder} holds no Hugging Face text tower: there is no {TEXT_CONFIG}")
    wanted = [*TEXT_WEIGHTS, *(f"{file}.index.json" for file in TEXT_WEIGHTS)]  # the latter list several files
    if base and not any((folder / file).is_file() for file in wanted):
        others = [path.name for path in sorted(folder.glob("*")) if path.suffix in (".safetensors", ".bin")]
        seen = f": call {others[0]} so (mv or ln)" if others else ""
        raise SettingsError(f"{folder} holds no weights of a text tower, {' or '.join(TEXT_WEIGHTS)}{seen}")
    return folder


def _image_weights(settings: ModelSettings, vision_cfg: Config) -> Path | Need | None:
    """The file of `model.image_pretrained`, or what it needs from the Hub.

    Raises SettingsError: the image tower is not timm's, or there is no such file or tag.
    """
    chosen, name = settings.image_pretrained, str(vision_cfg.get("timm_model_name") or "")
    if chosen is None:
        return None
    if not name:
        raise SettingsError(
            f"model.image_pretrained: the image tower of {_label(settings)} is open_clip's own, and its weights come "
            "with the text tower's, by --pretrained: take a model whose vision_cfg has timm_model_name"
        )
    if Path(chosen).is_file():
        return Path(chosen)
    entry = timm_entry(name, chosen)
    if entry is None:
        import timm

        tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{name.partition('.')[0]}.*")]
        raise SettingsError(
            f"model.image_pretrained {chosen!r} is neither a file nor a tag; tags of {name}: "
            f"{', '.join(tags) or 'none'}{did_you_mean(chosen, tags, 3)}"
        )
    if not entry.hf_hub_id:
        raise SettingsError(f"tag {chosen!r} of {name} is not on the Hub: fetch {entry.url} and give the file's path")
    return Need(entry.hf_hub_id, ((entry.hf_hub_filename,) if entry.hf_hub_filename else TEXT_WEIGHTS,))


def timm_entry(name: str, chosen: str) -> Any:
    """timm's PretrainedCfg of a tower with that tag, or with its default one; None if it has no such weights.

    Imports torch.
    """
    import timm

    base = name.partition(".")[0]
    wanted = name if chosen == "default" else f"{base}.{chosen}"
    known = timm.is_model(base) and (chosen == "default" or wanted in timm.list_pretrained(f"{base}.*"))
    entry = timm.get_pretrained_cfg(wanted) if known else None
    return entry if entry is not None and entry.has_weights else None


def _tokenizer_repo(settings: ModelSettings, tokenizer: TokenizerChoice | None, text_cfg: Config) -> str | Path | None:
    """The tokenizer's repository on the Hub, or its local folder; None for open_clip's own or a user's class."""
    kind = tokenizer.type if tokenizer is not None else "model"
    if kind == "hub":
        return str(getattr(tokenizer, "name", ""))
    if kind == "path":
        path = Path(getattr(tokenizer, "name", ""))
        folder = path.parent if path.is_file() else path
    elif kind != "model" or not text_cfg.get("hf_tokenizer_name"):
        return None
    elif (own := _own_folder(settings)) is not None:
        folder = own
    elif settings.text_model is not None:
        folder = Path(settings.text_model)
    elif Path(text_cfg["hf_tokenizer_name"]).is_dir():
        folder = Path(text_cfg["hf_tokenizer_name"])
    else:
        return str(text_cfg["hf_tokenizer_name"])
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise SettingsError(f"{folder} holds no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there")
    return folder


def _code_files(repo: str, cache_dir: str | None) -> tuple[tuple[str, ...], ...]:
    """The modules that a repository's tokenizer_config.json names; none until it is in the cache."""
    config = hub.cached(repo, ("tokenizer_config.json",), cache_dir)
    auto_map = {} if config is None else json.loads(config.read_text(encoding="utf-8")).get("auto_map", {})
    named = auto_map.get("AutoTokenizer", []) if isinstance(auto_map, dict) else auto_map
    references = [named] if isinstance(named, str) else [name for name in named if name]
    return tuple((f"{name.rpartition('.')[0]}.py",) for name in references if "--" not in name)  # of another repository


def _own_folder(settings: ModelSettings) -> Path | None:
    """The local folder with the weights' own tokenizer, if they have one."""
    chosen = settings.pretrained
    if chosen is None or chosen.startswith(HUB):
        return Path(settings.name[len(LOCAL) :]) if settings.name.startswith(LOCAL) else None
    folder = Path(chosen[len(LOCAL) :]) if chosen.startswith(LOCAL) else Path(chosen).parent
    return folder if any((folder / file).is_file() for file in TOKENIZER_FILES) else None
