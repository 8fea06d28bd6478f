"""The feature stores of a training run: opened, compared with the run's settings, and put in the place of towers.

Settings and towers enter; a StoredData leaves, or an error that names what differs. A store keeps a fingerprint of each
part (`features.manifest.PartInfo.fingerprint`): all of a model that its features depend on, as JSON values. Unlike the
sums of `evals.context`, the digest of the weights in it is cryptographic.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from clipstream.data.decode.tokenizers import Tokenizer
from clipstream.data.loader.stored import StoredData
from clipstream.data.order_plan import resolve_workers, tokenizer_identity, views_of
from clipstream.data.settings import DataSettings
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.features.manifest import IDS, IMAGE, MODEL, TEXT, differences
from clipstream.features.store import FeatureStore
from clipstream.losses.settings import DistillSettings
from clipstream.models.execution.batch_features import NAME as LIVE
from clipstream.models.frozen import members
from clipstream.models.model_config import WEIGHT_FILES, Config
from clipstream.models.settings import Tower
from clipstream.models.towers import Towers
from clipstream.models.weights import weights_digest
from clipstream.text import lines
from clipstream.utils.logs import announce

PRECISION = "precision"  # of the forward pass that made the features; training may compute in another one
Fingerprint = dict[str, object]
# Settings of text_cfg that say where files are, or only matter for a model without weights.
PLACES = ("hf_model_name", "hf_model_pretrained", "hf_tokenizer_name")


def with_stores(data: DataSettings, world: World) -> tuple[DataSettings, StoredData | None]:
    """The settings, whose `lanes` are resolved, with `workers` resolved, and the stores that they name; rank 0 prints a
    number that is not given.

    Raises SettingsError: as StoredData.open.
    """
    stored, workers, why = None, 0, "a thread gathers the features"
    if data.stored_towers or data.teacher_features:
        stored = StoredData.open(data.image_features, data.text_features, data.teacher_features, data.cache)
    if stored is None or not stored.replaces_loader:
        workers, why = resolve_workers(data, world)
    if why and world.is_main:
        announce(f"workers  {workers} a rank: {why}")
    return data.model_copy(update={"workers": workers}), stored


def check_stores(stored: StoredData, data: DataSettings, towers: Towers, tokenizer: Tokenizer) -> None:
    """Compare the settings and towers of the run, as `build_towers` gives them, with those that made the features.

    Raises SettingsError: tower, preprocessing, tokenizer, or how the data are read differ; names the differences.
    """
    for store, _ in stored.parts:
        for name, source in data.sources.items():
            if name in store.manifest.sources:
                _compare(store, f"data.sources.{name}", store.manifest.sources[name].settings, source.reading)
    identity = tokenizer_identity(tokenizer)
    if stored.ids is not None:
        then = stored.ids.manifest.parts[IDS].fingerprint
        _compare(stored.ids, "the tokenizer", then, {"tokenizer": identity})
    for tower, store in stored.towers.items():
        then = {key: value for key, value in store.manifest.parts[tower].fingerprint.items() if key != PRECISION}
        if tower == IMAGE:
            transform = then.get("transform")
            seed = transform.get("seed", 0) if isinstance(transform, dict) else 0
            views = views_of(data, store.manifest.views, seed)
            now = image_fingerprint(towers, precision="", transform=views)
        else:
            now = text_fingerprint(towers, precision="", tokenizer=identity)
            if now["weights"] != then["weights"] and same_text_weights(towers, then["weights"]):
                now["weights"] = then["weights"]
        now.pop(PRECISION)
        _compare(store, f"the {tower} tower", then, now)


def remove_towers(stored: StoredData, towers: Towers) -> None:
    """Remove the towers, in the dtypes of the run, whose features are stored; the store's model has their weights.

    Raises DataError: the store's model cannot be downloaded.
    """
    for tower, store in stored.towers.items():
        towers.remove(tower, store.local(f"{MODEL}/{WEIGHT_FILES[0]}"))


def teacher_scales(stored: StoredData, settings: DistillSettings) -> dict[str, float]:
    """Name of each stored teacher -> scale of its logits.

    Raises SettingsError: a store lacks the features of a teacher's images or texts; the live teacher has its name.
    """
    scales: dict[str, float] = {}
    for name in stored.teachers:
        for kind in (IMAGE, TEXT):
            if f"{name}.{kind}" not in stored.by_name:
                why = "distillation compares images with texts, and requires both; add them by clipstream precompute"
                raise SettingsError(f"data.teacher_features: teacher {name} has no {kind} features: {why}")
        if settings.model is not None and name == LIVE:
            raise SettingsError(f"data.teacher_features: {name} is the name of the live teacher: use another name")
        store, part = stored.by_name[f"{name}.{IMAGE}"]
        scale = store.manifest.parts[part].logit_scale
        if scale is None and settings.teacher_temperature is None:
            what = f"{store.shown} has no logit scale of teacher {name}"
            raise SettingsError(f"data.teacher_features: {what}: set --distill.teacher-temperature")
        scales[name] = 1.0 if scale is None else scale
    return scales


def _compare(store: FeatureStore, what: str, then: Mapping[str, object], now: Mapping[str, object]) -> None:
    if differing := differences(then, now):
        head = f"the feature store {store.shown} was made with other settings of {what}:"
        advice = "train with those, or compute the features again, into another folder"
        raise SettingsError(lines(head, *(f"  {one}" for one in differing), advice))


def image_fingerprint(towers: Towers, *, precision: str, transform: Mapping[str, object]) -> Fingerprint:
    """Fingerprint of the features of an image tower.

    Args:
        towers: as `build_towers` returns them, before they are converted to another dtype.
        precision: of the forward pass, as in training.
        transform: what else decides the pixels, as `data.order_plan.views_of` gives it.
    """
    spec, preprocess = towers.image, towers.config.preprocess_cfg
    resize = {"interpolation": spec.interpolation, "resize_mode": spec.resize_mode, "fill": spec.fill}
    resize |= {"floor_crop": True} if spec.floor_crop else {}
    values: Fingerprint = {"mean": preprocess["mean"], "std": preprocess["std"], "size": spec.size}
    values |= {} if transform.get("views") else {"preprocessing": resize}  # which a random crop does not use
    return _fingerprint(towers, "image", **values, precision=precision, transform=dict(transform))


def text_fingerprint(towers: Towers, *, precision: str, tokenizer: str) -> Fingerprint:
    """Fingerprint of the features of a text tower; `tokenizer` is a `data.order_plan.tokenizer_identity`."""
    length = towers.context_length
    return _fingerprint(towers, "text", context_length=length, tokenizer=tokenizer, precision=precision)


def _fingerprint(towers: Towers, tower: Tower, **more: object) -> Fingerprint:
    """Of a tower's configuration and weights, and more values; as it is read back from JSON: tuples equal lists."""
    model: Config = towers.config.model_cfg
    section = model["vision_cfg" if tower == "image" else "text_cfg"]
    values = {
        "config": {key: value for key, value in section.items() if key not in PLACES},
        "embed_dim": model["embed_dim"],
        "quick_gelu": bool(model.get("quick_gelu", False)),
        "weights": weights_digest(tower_state(towers, tower).items()),
    }
    found: Fingerprint = json.loads(json.dumps(values | more))
    return found


def tower_state(towers: Towers, tower: Tower) -> dict[str, torch.Tensor]:
    """The tensors of one tower, by their names in open_clip's model; without the scalars of the logits."""
    own = members(towers.clip, tower)
    return {name: tensor for name, tensor in towers.clip.state_dict().items() if name.partition(".")[0] in own}


def same_text_weights(towers: Towers, digest: object) -> bool:
    """Whether a digest is of the text tower's weights, as a module of its own (`text.`) or not."""
    state = {name.removeprefix("text."): tensor for name, tensor in tower_state(towers, "text").items()}
    named = (((f"{prefix}{name}", tensor) for name, tensor in state.items()) for prefix in ("", "text."))
    return any(weights_digest(tensors) == digest for tensors in named)
