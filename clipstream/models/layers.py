"""Parts of towers: repeated blocks, layers in order of depth for learning rates per layer, and convolutions.

A model of open_clip enters; modules, or lists of parameters from the input to the projection, leave. The partition into
layers is that of open_clip's main branch (`layer_groups` of its towers).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from open_clip.hf_configs import arch_dict
from timm.models import group_parameters
from torch import nn

from clipstream.errors import SettingsError
from clipstream.models.frozen import members
from clipstream.models.settings import Tower


def blocks(towers: nn.Module) -> list[nn.Module]:
    """The repeated blocks of the towers: outermost modules in a list of modules of the same class."""
    if isinstance(towers, nn.ModuleList | nn.Sequential):
        children = list(towers.children())
        if len(children) > 1 and len({type(child) for child in children}) == 1 and any(children[0].children()):
            return [child for child in children if any(True for _ in child.parameters())]
    return [block for child in towers.children() for block in blocks(child)]


def batch_norms(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]


Member = nn.Module | nn.Parameter | None


def tower_parameters(clip: Any, tower: Tower) -> list[tuple[str, nn.Parameter]]:
    """The parameters of a tower and its projection, without scale and bias of the logits."""
    own = members(clip, tower)
    return [(name, parameter) for name, parameter in clip.named_parameters() if name.partition(".")[0] in own]


def tower_layers(clip: Any, tower: Tower, *, own_pooler: bool = False) -> list[list[nn.Parameter]]:
    """All parameters of a tower, each once, by layer: embeddings, blocks, and the head with the projection.

    The last normalization belongs to the last block.

    Args:
        own_pooler: whether the pooler of a Hugging Face text tower is a layer below the head, and not part of it.

    Raises SettingsError: the layers of this tower are not known.
    """
    own = [parameter for _, parameter in tower_parameters(clip, tower)]
    if not own:
        raise SettingsError(f"the model has no {tower} tower, as its features come from a store")
    below = _image_layers(clip.visual) if tower == "image" else _text_layers(clip, own_pooler)
    layers = [list(_parameters(layer)) for layer in below]
    placed = {id(parameter) for layer in layers for parameter in layer}
    head = [parameter for parameter in own if id(parameter) not in placed]
    return [*layers, head] if head else layers


def _parameters(layer: Iterable[Member]) -> Iterator[nn.Parameter]:
    for member in layer:
        if isinstance(member, nn.Parameter):
            yield member
        elif member is not None:
            yield from member.parameters()


def _image_layers(visual: Any) -> list[list[Member]]:
    """The layers of an image tower below the head."""
    if hasattr(visual, "trunk"):
        names: dict[Any, list[str]] = group_parameters(visual.trunk, visual.trunk.group_matcher())
        return [[visual.trunk.get_parameter(name) for name in names[layer]] for layer in sorted(names)]
    if hasattr(visual, "layer4"):  # a ResNet of CLIP
        stem = [getattr(visual, f"{kind}{number}") for number in (1, 2, 3) for kind in ("conv", "bn")]
        return [stem, *([getattr(visual, f"layer{number}")] for number in (1, 2, 3, 4))]
    if not hasattr(visual, "transformer"):
        raise SettingsError(f"the layers of the image tower {type(visual).__name__} are not known")
    return _native_layers(visual, ("conv1", "class_embedding", "positional_embedding", "ln_pre"), "ln_post")


def _text_layers(clip: Any, own_pooler: bool) -> list[list[Member]]:
    """The layers of a text tower below the head."""
    text = getattr(clip, "text", clip)
    if not hasattr(text, "config"):  # open_clip's own
        return _native_layers(text, ("token_embedding", "positional_embedding", "cls_emb"), "ln_final")
    tower, names = text.transformer, arch_dict[text.config.model_type]["config_names"]
    blocks = getattr(getattr(tower, "encoder", tower), names.get("layer_attr", "layer"), None)
    embeddings = getattr(tower, names.get("token_embeddings_attr", "embeddings"), None)
    if blocks is None or embeddings is None:
        raise SettingsError(f"the layers of the text tower {type(tower).__name__} are not known")
    layers: list[list[Member]] = [[embeddings], *([block] for block in blocks)]
    if own_pooler and getattr(tower, "pooler", None) is not None:
        layers.append([tower.pooler])
    return layers


def _native_layers(tower: Any, embeddings: Iterable[str], last_norm: str) -> list[list[Member]]:
    """The layers of a transformer of open_clip below the head."""
    layers: list[list[Member]] = [[getattr(tower, name, None) for name in embeddings]]
    layers += [[block] for block in tower.transformer.resblocks]
    layers[-1].append(getattr(tower, last_norm, None))
    return layers


# oneDNN's backward pass of a strided 1 x 1 convolution over fewer channels than a vector register holds writes outside
# of its memory in channels-last format (torch 2.15 on the CPU: seen for 2 to 5 input channels; registers have 8 or 16
# floats). Such convolutions read the pixels of FastViT, MobileOne and RepVGG.
VECTOR = 16


def is_convolutional(tower: nn.Module) -> bool:
    """Whether a tower has several convolutions over neighbouring pixels, more than a ViT's patch embedding."""
    return sum(isinstance(module, nn.Conv2d) and max(module.kernel_size) > 1 for module in tower.modules()) > 1


def tune_convolutions(towers: nn.Module, device: str) -> None:
    """Let cuDNN measure, in this process, which algorithm is the fastest for each shape, if a tower is convolutional;
    not with torch's deterministic algorithms, as the choice may differ between runs.
    """
    if device.startswith("cuda") and not torch.are_deterministic_algorithms_enabled() and is_convolutional(towers):
        torch.backends.cudnn.benchmark = True


@dataclass(frozen=True)
class ChannelsLast:
    """Channels-last layout of the pixels of a convolutional image tower.

    Only the pixels are laid out so: convolutions, batch norm and pooling keep the format of their input. Parameters,
    gradients, moments and checkpoints are those without it. Features and gradients differ by rounding alone.

    Attributes:
        always: whether on every device; else on the CPU, and on GPUs in 16 bits, whose tensor cores compute
            convolutions in channels-last format.
    """

    always: bool = False

    @classmethod
    def of(cls, tower: nn.Module, setting: Literal["auto", "on", "off"]) -> ChannelsLast | None:
        """The layout for a tower; None for contiguous pixels: for 'off', and for 'auto' where it does not pay (a ViT)
        or is not safe.

        Raises SettingsError: 'on' where it is not safe.
        """
        convolutions = [module for module in tower.modules() if isinstance(module, nn.Conv2d)]
        unsafe = [c for c in convolutions if max(c.kernel_size) == 1 and max(c.stride) > 1 and c.in_channels < VECTOR]
        if setting == "on":
            if unsafe:
                raise SettingsError(
                    f"model.channels_last: {type(tower).__name__} has a strided 1 x 1 convolution over "
                    f"{unsafe[0].in_channels} channels, which torch does not support in this format on the CPU: use "
                    f"auto or off"
                )
            return cls(always=True)
        return None if setting == "off" or unsafe or not is_convolutional(tower) else cls()

    def apply(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Pixels [n, 3, H, W] in the layout for a tower with weights of `dtype`, outside or inside of autocast."""
        device = pixels.device.type
        # torch knows no autocast on the meta device, on which FLOPs are counted.
        narrow = dtype.itemsize == 2 or (device != "meta" and torch.is_autocast_enabled(device))
        pays = self.always or device == "cpu" or narrow
        return pixels.contiguous(memory_format=torch.channels_last) if pays else pixels
