"""Layers of towers: repeated blocks, layers in order of depth for learning rates per layer, convolutions, and
layers that move less memory on a GPU.

A model of open_clip enters; modules, or lists of parameters from the input to the projection, leave. The partition into
layers is that of open_clip's main branch (`layer_groups` of its towers).

On a GPU, attention runs without copies, and patches are rows of a product (`suit_gpus`): a layer of open_clip or timm
changes its class, and keeps its parameters and their names. On a CPU, and where a layer is used in another way than in
a tower's blocks, it runs as before. Results differ from before by rounding alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from open_clip.hf_configs import arch_dict
from timm.models import group_parameters
from torch import nn
from torch.nn.utils import parametrize

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

    The last normalization belongs to the last block. With `own_pooler`, the pooler of a Hugging Face text tower is a
    layer below the head, and not part of it.

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
    """

    # Whether on every device; else on the CPU, and on GPUs in 16 bits, whose tensor cores compute in this format.
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
                what = f"a strided 1 x 1 convolution over {unsafe[0].in_channels} channels"
                why = f"{type(tower).__name__} has {what}, which torch does not support in this format on the CPU"
                raise SettingsError(f"model.channels_last: {why}: use auto or off")
            return cls(always=True)
        return None if setting == "off" or unsafe or not is_convolutional(tower) else cls()

    def apply(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Pixels [n, 3, H, W] in the layout for a tower with weights of `dtype`, outside or inside of autocast."""
        device = pixels.device.type
        # torch knows no autocast on the meta device, on which FLOPs are counted.
        narrow = dtype.itemsize == 2 or (device != "meta" and torch.is_autocast_enabled(device))
        pays = self.always or device == "cpu" or narrow
        return pixels.contiguous(memory_format=torch.channels_last) if pays else pixels


NARROW = (torch.bfloat16, torch.float16)
# Rows of a product that begin at a multiple of 16 bytes, so many numbers of 16 bits, are read at full speed.
ALIGNED = 8


def on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of products of a tensor, under autocast as well."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


class SelfAttention(nn.MultiheadAttention):
    """Attention of tokens to each other.

    On a GPU, attention reads queries, keys and values where their projection wrote them. torch's layer copies the
    projection, transposes texts and tokens, and in the backward pass fills and adds three gradients of its whole size.
    """

    def forward(
        self, query: torch.Tensor, *inputs: Any, attn_mask: Any = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.is_plain(query, inputs, options) and (attn_mask is None or attn_mask.ndim == 2):
            return self.attend(query, attn_mask), None
        options["attn_mask"] = attn_mask
        return super().forward(query, *inputs, **options)

    def is_plain(self, query: torch.Tensor, inputs: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Whether a call on a GPU is that of a block of open_clip's, and the layer has nothing but its projections."""
        return (
            on_gpu(query)
            and query.ndim == 3
            and options == {"need_weights": False}
            and len(inputs) == 2
            and inputs[0] is query
            and inputs[1] is query
            and self.batch_first
            and self._qkv_same_embed_dim
            and self.dropout == 0
            and self.bias_k is None
            and not self.add_zero_attn
        )

    def attend(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, causal: bool = False) -> torch.Tensor:
        """Attention of tokens [n, T, width], to those before them if `causal`."""
        projected = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        parts = projected.view(*x.shape[:2], 3, self.num_heads, self.head_dim).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return cast(torch.Tensor, self.out_proj(found.transpose(1, 2).flatten(2)))


class PatchProjection(nn.Conv2d):
    """Convolution of patches that do not overlap.

    In 16 bits on a GPU, it is one product of patches and weights. Of 1,024 images in patches of 32 x 32 pixels, such a
    product takes 0.3 ms; cuDNN's convolution takes 5 ms, and that for the gradient of the weights 9 ms (H200, bf16).
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        (height, width), (n, channels, *size) = self.kernel_size, input.shape
        if input.ndim != 4 or size[0] % height or size[1] % width or not on_gpu(input):
            return super().forward(input)
        if (dtype := compute_dtype(input)) not in NARROW:
            return super().forward(input)
        high, wide = size[0] // height, size[1] // width
        patches = input.view(n, channels, high, height, wide, width).permute(0, 2, 4, 1, 3, 5)
        rows = patches.to(dtype, memory_format=torch.contiguous_format).reshape(
            n, high * wide, channels * height * width
        )
        weight = self.weight.flatten(1)
        if missing := -rows.shape[2] % ALIGNED:
            rows, weight = F.pad(rows, (0, missing)), F.pad(weight, (0, missing))
        return F.linear(rows, weight, self.bias).transpose(1, 2).view(n, self.out_channels, high, wide)


def suit_gpus(clip: nn.Module) -> None:
    """Let the layers of open_clip's model, in place, compute on GPUs as this module has it."""
    for module in clip.modules():
        attention = getattr(module, "attn", None)
        if type(attention) is nn.MultiheadAttention:
            attention.__class__ = SelfAttention
    visual = cast(nn.Module, clip.visual)
    for module in [] if is_convolutional(visual) else visual.modules():
        if type(module) is not nn.Conv2d or module.groups > 1 or module.dilation != (1, 1):
            continue
        if module.kernel_size == module.stride and min(module.kernel_size) > 1 and module.padding in ((0, 0), "valid"):
            module.__class__ = PatchProjection


def restore_layers(clip: nn.Module) -> None:
    """Give the layers of a model, in place, the classes that open_clip builds it with; not those with an adapter."""
    for module in clip.modules():
        theirs = nn.MultiheadAttention if isinstance(module, SelfAttention) else nn.Conv2d
        if isinstance(module, SelfAttention | PatchProjection) and not parametrize.is_parametrized(module):
            module.__class__ = theirs  # type: ignore[assignment]
