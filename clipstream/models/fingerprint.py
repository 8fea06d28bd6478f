"""Fingerprints of towers: all of a model that its features depend on, as JSON values.

A store of features keeps the fingerprint of each part (`features.manifest.PartInfo.fingerprint`), and training compares
it with that of the model it is asked to train (`features.manifest.differences`). Unlike the sums of
`evals.fingerprints`, the digest of the weights is cryptographic.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

import torch

from clipstream.models.frozen import Tower
from clipstream.models.model_config import Config
from clipstream.models.towers import Towers

Fingerprint = dict[str, object]
IMAGE_PREFIX = "visual."
SCALARS = ("logit_scale", "logit_bias")
# Settings of text_cfg that say where files are, or only matter for a model without weights.
PLACES = ("hf_model_name", "hf_model_pretrained", "hf_tokenizer_name")


def image_fingerprint(towers: Towers, *, precision: str, transform: Mapping[str, object]) -> Fingerprint:
    """Fingerprint of the features of an image tower.

    Args:
        towers: as `build_towers` returns them, before they are converted to another dtype.
        precision: of the forward pass, as in training.
        transform: what else decides the pixels, as `data.order_plan.views_of` gives it.
    """
    spec, preprocess = towers.image, towers.config.preprocess_cfg
    resize = {"interpolation": spec.interpolation, "resize_mode": spec.resize_mode, "fill": spec.fill}
    return _fingerprint(
        towers,
        "image",
        mean=preprocess["mean"],
        std=preprocess["std"],
        size=spec.size,
        **({} if transform.get("views") else {"preprocessing": resize}),  # which a random crop does not use
        precision=precision,
        transform=dict(transform),
    )


def text_fingerprint(towers: Towers, *, precision: str, tokenizer: str) -> Fingerprint:
    """Fingerprint of the features of a text tower.

    Args:
        towers: as in `image_fingerprint`.
        precision: of the forward pass, as in training.
        tokenizer: `data.order_plan.tokenizer_identity` of the tokenizer.
    """
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


def weights_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 of tensors, in hexadecimal digits: of their names in order, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        value = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tower_state(towers: Towers, tower: Tower) -> dict[str, torch.Tensor]:
    """The tensors of one tower, by their names in open_clip's model; without the scalars of the logits."""
    return {
        name: tensor
        for name, tensor in towers.clip.state_dict().items()
        if name not in SCALARS and name.startswith(IMAGE_PREFIX) == (tower == "image")
    }


def same_text_weights(towers: Towers, digest: object) -> bool:
    """Whether a digest is of the text tower's weights, as a module of its own (`text.`) or not."""
    state = {name.removeprefix("text."): tensor for name, tensor in tower_state(towers, "text").items()}
    named = (((f"{prefix}{name}", tensor) for name, tensor in state.items()) for prefix in ("", "text."))
    return any(weights_digest(tensors) == digest for tensors in named)
