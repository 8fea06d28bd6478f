"""Owns what a model is made of: its configuration, weights, preprocessing and tokenizer files, and where they lie.

Never imports torch, so that a missing file is found within a second of the start; never builds a model (`towers`
does).
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from clipstream.errors import ClipstreamError, SettingsError, did_you_mean
from clipstream.model import hub
from clipstream.model.catalogue import HUB, LOCAL, builtin, read_config, refuse, table
from clipstream.model.hub import Need
from clipstream.model.settings import ModelSettings
from clipstream.world import World

CONFIG_FILE = "open_clip_config.json"
WEIGHT_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
AVERAGED_FILE = "averaged.safetensors"  # of a checkpoint, beside its trained weights
LOCAL_WEIGHT_FILES = (*WEIGHT_FILES, "model.safetensors", "pytorch_model.bin", "model.pth", AVERAGED_FILE)
TOKENIZER_FILES = ("tokenizer.json", "spiece.model", "sentencepiece.bpe.model", "vocab.txt", "vocab.json")
TOKENIZER_EXTRAS = ("special_tokens_map.json", "added_tokens.json", "merges.txt", "config.json")
TOKENIZER_KEYS = ("hf_tokenizer_name", "tokenizer_kwargs", "tokenizer_mode", "context_length")
PREPROCESS_KEYS = ("mean", "std", "interpolation", "resize_mode", "fill_color")


class TokenizerChoice(Protocol):
    """What the model room needs of the tokenizer's settings; 'hub' and 'path' ones have a `name` as well."""

    @property
    def type(self) -> str:
        """model, hub, path, or a user's own package.module:Name."""

    @property
    def context_length(self) -> int | None:
        """Tokens a caption, or the model's own."""


@dataclass(frozen=True)
class Source:
    """All that is needed to build a model, on this machine's disk.

    Attributes:
        label: how messages call it.
        model_cfg: open_clip's model configuration.
        preprocess_cfg: mean, std, interpolation, …: what is not open_clip's default.
        weights: file of the weights; None for a fresh model.
        tokenizer: folder of a Hugging Face tokenizer; None for open_clip's own BPE.
        text_model: folder with config.json (and base weights) of a Hugging Face text tower.
    """

    label: str
    model_cfg: dict[str, Any]
    preprocess_cfg: dict[str, Any]
    weights: Path | None
    tokenizer: Path | None
    text_model: Path | None


@dataclass(frozen=True)
class _Weights:
    """Where weights come from: a repository's `names`, or a local `path`; or nowhere (a fresh model)."""

    repo: str = ""
    names: tuple[str, ...] = ()
    path: Path | None = None
    preprocess: dict[str, Any] | None = None
    model_cfg: dict[str, Any] | None = None

    @property
    def fresh(self) -> bool:
        """Whether there are none."""
        return not self.repo and self.path is None


def preflight(
    settings: ModelSettings,
    tokenizer: TokenizerChoice | None = None,
    *,
    loss_type: str | None = None,
    ask: bool = True,
) -> None:
    """Find out, without torch and within seconds, whether the model's files are here or can be fetched.

    Args:
        loss_type: 'clip' or 'siglip' where the user chose one.
        ask: whether this process may ask if the Hub is in reach; one a node is enough.

    Raises:
        SettingsError: a name, tag or file is unknown; tokenizer or loss are not those that the weights were made
            with; or files of the Hub are not in the cache and the Hub is not in reach.
    """
    missing = hub.missing(needs(settings, tokenizer, loss_type), settings.cache_dir)
    if ask and missing and (reason := hub.why_unreachable()):
        raise hub.explain(missing, settings.cache_dir, _label(settings), reason)


def fetch(settings: ModelSettings, tokenizer: TokenizerChoice | None, world: World) -> None:
    """Bring the model's files into the Hub's cache: one rank a node talks to the Hub, all ranks wait for it.

    Collective: every rank calls it, and an error of one is raised on all.

    Raises:
        SettingsError: as `preflight`, or a download failed.
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
    """The Hub's files that a model takes. A configuration that is not in the cache yet hides those that it names.

    Raises:
        SettingsError: a name, tag or local file that does not exist; or a tokenizer or a loss of another model.
    """
    found = []
    if settings.name.startswith(HUB):
        found.append(Need(hub.repository(settings.name), ((CONFIG_FILE,),)))
    weights = _weights(settings)
    if weights.repo:
        config = ((CONFIG_FILE,),) if (settings.pretrained or "").startswith(HUB) else ()
        found.append(Need(weights.repo, (*config, weights.names)))
    config_found = _settled_config(settings, weights)
    if config_found is None:
        return found
    text_cfg = config_found["model_cfg"]["text_cfg"]
    _check_loss(settings, loss_type, config_found["model_cfg"], weights)
    _check_tokenizer(settings, tokenizer, text_cfg, fresh=weights.fresh)
    repo = _tokenizer_repo(settings, tokenizer, text_cfg)
    if isinstance(repo, str):
        found.append(Need(repo, (TOKENIZER_FILES, ("tokenizer_config.json",)), TOKENIZER_EXTRAS))
    text_model = text_cfg.get("hf_model_name")
    if text_model and not Path(text_model).is_dir():
        base = weights.fresh and text_cfg.get("hf_model_pretrained", True)
        files = (("model.safetensors", "pytorch_model.bin"),) if base else ()
        found.append(Need(text_model, (("config.json",), *files)))
    return found


def resolve(settings: ModelSettings, tokenizer: TokenizerChoice | None = None) -> Source:
    """Where everything lies on this machine's disk; asks no network.

    Raises:
        SettingsError: as `preflight`, also for files that the Hub could give (`fetch` brings them first).
    """
    cache, label = settings.cache_dir, _label(settings)
    if missing := hub.missing(needs(settings, tokenizer), cache):
        raise hub.explain(missing, cache, label, "they were not fetched")
    weights = _weights(settings)
    config = _settled_config(settings, weights)
    assert config is not None, "needs() names a configuration that is not in the cache"
    path = hub.cached(weights.repo, weights.names, cache) if weights.repo else weights.path
    model_cfg, preprocess_cfg = config["model_cfg"], config["preprocess_cfg"]
    repo = _tokenizer_repo(settings, tokenizer, model_cfg["text_cfg"])
    folder = _parent(hub.cached(repo, TOKENIZER_FILES, cache)) if isinstance(repo, str) else repo
    _set_tokenizer(model_cfg["text_cfg"], tokenizer)
    text_name = model_cfg["text_cfg"].get("hf_model_name")
    text_model = None
    if text_name:
        local = Path(text_name)
        text_model = local if local.is_dir() else _parent(hub.cached(text_name, ("config.json",), cache))
    return Source(label, model_cfg, preprocess_cfg, path, folder, text_model)


def _settled_config(settings: ModelSettings, weights: _Weights) -> dict[str, Any] | None:
    """The configuration that `model.name` names, with what belongs to the weights taken from theirs.

    Preprocessing, activation and tokenizer belong to the weights; what a user wrote into a configuration file of his
    own stands above that. None while one of the two configurations is on the Hub and not in the cache.
    """
    config = _named_config(settings)
    if config is None:
        return None
    named = _is_path(settings.name)
    model_cfg, preprocess = deepcopy(config["model_cfg"]), _preprocess_only(config["preprocess_cfg"])
    theirs, their_preprocess = weights.model_cfg, weights.preprocess
    if weights.repo and (settings.pretrained or "").startswith(HUB):
        file = hub.cached(weights.repo, (CONFIG_FILE,), settings.cache_dir)
        if file is None:
            return None
        theirs, their_preprocess = read_config(file).values()
    if theirs is not None:
        _lay(model_cfg, theirs, ("quick_gelu",), keep=named)
        _lay(model_cfg["text_cfg"], theirs.get("text_cfg", {}), TOKENIZER_KEYS, keep=named)
    other = _preprocess_only(their_preprocess or {})
    return {
        "model_cfg": model_cfg,
        "preprocess_cfg": {**other, **preprocess} if named else {**preprocess, **other},
    }


def _lay(mine: dict[str, Any], theirs: dict[str, Any], keys: tuple[str, ...], *, keep: bool) -> None:
    """Make `keys` of a configuration those of another; with `keep`, only what `mine` leaves open."""
    for key in keys:
        if keep and key in mine:
            continue
        if key in theirs:
            mine[key] = theirs[key]
        else:
            mine.pop(key, None)


def _label(settings: ModelSettings) -> str:
    return f"model {settings.name}" + (f" with {settings.pretrained}" if settings.pretrained else "")


def _is_path(name: str) -> bool:
    return not name.startswith((HUB, LOCAL)) and (name.endswith(".json") or Path(name).is_file())


def _preprocess_only(config: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in PREPROCESS_KEYS if config.get(key) is not None}


def _parent(path: Path | None) -> Path | None:
    return None if path is None else path.parent


def _named_config(settings: ModelSettings) -> dict[str, Any] | None:
    """The configuration that `model.name` names; None while it is on the Hub and not in the cache."""
    name = settings.name
    if name.startswith(HUB):
        path = hub.cached(hub.repository(name), (CONFIG_FILE,), settings.cache_dir)
        config = None if path is None else read_config(path)
    elif name.startswith(LOCAL):
        config = read_config(Path(name[len(LOCAL) :]) / CONFIG_FILE)
    elif _is_path(name):
        config = read_config(Path(name))
    else:
        config = {"model_cfg": builtin(name.replace("/", "-")), "preprocess_cfg": {}}
    if config is not None:
        refuse(name, config["model_cfg"])
    return config


def _weights(settings: ModelSettings) -> _Weights:
    """Where the weights of `settings` come from.

    Raises:
        SettingsError: an unknown tag, a folder without weights, a missing file.
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
        config = read_config(folder / CONFIG_FILE)
        path = next((folder / file for file in LOCAL_WEIGHT_FILES if (folder / file).is_file()), None)
        if path is None:
            raise SettingsError(
                f"{chosen} has no weights: {folder} holds none of {', '.join(LOCAL_WEIGHT_FILES)}; to start fresh, "
                f"give the path of its {CONFIG_FILE} as model.name"
            )
        return _Weights(path=path, preprocess=config["preprocess_cfg"], model_cfg=config["model_cfg"])
    # As in open_clip.add_model_config, a configuration file goes by its stem: its tags are those of that name.
    known = Path(name).stem if _is_path(name) else name.replace("/", "-")
    tags = [] if name.startswith((HUB, LOCAL)) else table().list_pretrained_tags_by_model(known)
    entry = table().get_pretrained_cfg(known, chosen) if tags else {}
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
    config = read_config(beside)
    return _Weights(path=Path(chosen), preprocess=config["preprocess_cfg"], model_cfg=config["model_cfg"])


def settle_loss(
    settings: ModelSettings, wanted: str | None, model_cfg: dict[str, Any], *, weights_for: str | None
) -> str:
    """The type of loss to train with: what was asked for, else what the configuration, else what the weights say.

    Args:
        wanted: the user's choice.
        model_cfg: open_clip's configuration: with init_logit_bias it is a siglip model's.
        weights_for: the loss that the weights were trained with; None for a fresh model, which may become either.

    Raises:
        SettingsError: weights or configuration are made for another loss, and no `allow_mismatch`.
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


def _check_loss(settings: ModelSettings, wanted: str | None, model_cfg: dict[str, Any], weights: _Weights) -> None:
    """Raise where the configuration tells already that the loss is another's; `towers` looks into the weights."""
    if wanted is None or weights.path is not None:
        return
    published = "siglip" if model_cfg.get("init_logit_bias") is not None else "clip"
    settle_loss(settings, wanted, model_cfg, weights_for=None if weights.fresh else published)


def _check_tokenizer(
    settings: ModelSettings, tokenizer: TokenizerChoice | None, text_cfg: dict[str, Any], *, fresh: bool
) -> None:
    """Raise where pretrained weights would get token ids that they were not made for."""
    if fresh or tokenizer is None or tokenizer.type == "model" or settings.allow_mismatch:
        return
    own = text_cfg.get("hf_tokenizer_name")
    if own and getattr(tokenizer, "name", None) == own:
        return
    raise SettingsError(
        f"the weights of {_label(settings)} were trained with the model's own tokenizer "
        f"({own or 'the BPE of CLIP'}), not with tokenizer.type {tokenizer.type!r}: leave tokenizer.type at 'model', "
        "or set model.allow_mismatch to true"
    )


def _tokenizer_repo(
    settings: ModelSettings, tokenizer: TokenizerChoice | None, text_cfg: dict[str, Any]
) -> str | Path | None:
    """The tokenizer's repository on the Hub, or its local folder, or None: open_clip's own or a user's class."""
    kind = tokenizer.type if tokenizer is not None else "model"
    if kind == "hub":
        return str(getattr(tokenizer, "name", ""))
    if kind == "path":
        path = Path(getattr(tokenizer, "name", "")).expanduser()
        folder = path.parent if path.is_file() else path
    elif kind != "model" or not text_cfg.get("hf_tokenizer_name"):
        return None
    elif (own := _own_folder(settings)) is not None:
        folder = own
    elif Path(text_cfg["hf_tokenizer_name"]).is_dir():
        folder = Path(text_cfg["hf_tokenizer_name"])
    else:
        return str(text_cfg["hf_tokenizer_name"])
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise SettingsError(f"{folder} holds no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there")
    return folder


def _own_folder(settings: ModelSettings) -> Path | None:
    """The local folder with the weights' own tokenizer, if they have one."""
    chosen = settings.pretrained
    if chosen is None or chosen.startswith(HUB):
        return Path(settings.name[len(LOCAL) :]) if settings.name.startswith(LOCAL) else None
    folder = Path(chosen[len(LOCAL) :]) if chosen.startswith(LOCAL) else Path(chosen).parent
    return folder if any((folder / file).is_file() for file in TOKENIZER_FILES) else None


def _set_tokenizer(text_cfg: dict[str, Any], tokenizer: TokenizerChoice | None) -> None:
    """Write the run's own choice of tokenizer into the model's configuration, as open_clip reads it."""
    if tokenizer is None:
        return
    if tokenizer.context_length is not None:
        text_cfg["context_length"] = tokenizer.context_length
    name = getattr(tokenizer, "name", None)
    if tokenizer.type not in ("hub", "path") or name == text_cfg.get("hf_tokenizer_name"):
        return
    # open_clip takes the files beside a saved configuration whatever the name: a path of this machine stays out.
    text_cfg["hf_tokenizer_name"] = name if tokenizer.type == "hub" else "tokenizer"
    text_cfg.pop("tokenizer_kwargs", None)
    text_cfg.pop("tokenizer_mode", None)
