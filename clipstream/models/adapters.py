"""Low-rank adapters of the layers of a tower: LoRA (arXiv:2106.09685) and DoRA (arXiv:2402.09353), in peft's format.

A model of open_clip enters, and keeps its form: an adapted matrix is a parametrization of torch, so that whatever reads
`.weight` reads the sum of both, and the model's state dict is that of the merged model. The adapter leaves by itself,
as peft's adapter_config.json and adapter_model.safetensors.

With A [r, in], B [out, r] and the frozen W [out, in], the layer's matrix is V = W + alpha / r * B A; with DoRA each of
its rows is scaled to the trained length m: m V / |V|, where |V| has no gradient, as in section 4.3 of the paper.
Rows of the embedding of tokens are trained as they are (peft's trainable tokens).

Of torch's MultiheadAttention, queries, keys and values are adapted. peft also adapts its out_proj, but adds that
product twice (0.21.2; huggingface/peft#3774): it is 0 here, which is the same before and after a correction.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from open_clip.modified_resnet import AttentionPool2d
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import parametrize

from clipstream.errors import SettingsError, errors_as
from clipstream.models.frozen import members
from clipstream.models.layers import blocks
from clipstream.models.settings import LoraSettings, Tower
from clipstream.models.weights import check_finite, weights_digest

CONFIG, WEIGHTS, DIGEST = "adapter_config.json", "adapter_model.safetensors", "base.sha256"
PARTS = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "magnitude": "lora_magnitude_vector",
         "rows": "token_adapter.trainable_tokens_delta"}  # in peft's files  # fmt: skip
_OUT = ".base_layer.out_proj"  # in the name of a layer of MultiheadAttention in peft's files
Tensors = Mapping[str, torch.Tensor]


class LowRank(nn.Module):
    """A parametrization: the frozen matrix W -> the matrix that the layer has.

    Args:
        layer: whose matrix it is. A convolution's is [out, in, height, width]: A has this kernel, and B one of 1 x 1.
        generator: of the initial A, which is that of nn.Linear and of peft; B is 0.
    """

    def __init__(self, layer: nn.Module, settings: LoraSettings, generator: torch.Generator) -> None:
        super().__init__()
        weight: torch.Tensor = getattr(layer, _matrix(layer))
        first = torch.empty(settings.rank, *weight.shape[1:])
        self.lora_A = nn.Parameter(nn.init.kaiming_uniform_(first, a=math.sqrt(5), generator=generator))
        self.lora_B = nn.Parameter(torch.zeros(weight.shape[0], settings.rank, *[1] * (weight.ndim - 2)))
        self.magnitude = nn.Parameter(weight.detach().norm(dim=1)) if settings.dora else None
        self.scale = settings.scale

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """See `merge`."""
        return self.merge(weight, self.lora_A, self.lora_B, self.magnitude)

    def merge(
        self, weight: torch.Tensor, first: torch.Tensor, second: torch.Tensor, magnitude: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The layer's weight, in the dtype and shape of `weight`, also under autocast, with these A, B and m."""
        if weight.is_meta:  # where the FLOPs of a sample are counted, and this product is made once for all samples
            return weight + first.sum() + second.sum()
        with torch.autocast(weight.device.type, enabled=False):
            product = second.flatten(1) @ first.flatten(1)
            found = weight + self.scale * product.view(weight.shape)
            return found if magnitude is None else (magnitude / found.detach().norm(dim=1))[:, None] * found


class TokenRows(nn.Module):
    """A parametrization of an embedding: the frozen matrix W [vocabulary, width] -> W with trained rows of some tokens,
    int64 [n], increasing.
    """

    tokens: torch.Tensor

    def __init__(self, weight: torch.Tensor, tokens: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("tokens", tokens, persistent=False)
        self.rows = nn.Parameter(weight.detach()[tokens])

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """See `merge`."""
        return self.merge(weight, self.rows)

    def merge(self, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The layer's weight, with these rows; sharded as `weight` is."""
        if isinstance(weight, DTensor):
            whole = self.merge(weight.full_tensor(), getattr(rows, "full_tensor", lambda: rows)())
            return distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)
        return weight.index_copy(0, self.tokens, rows.to(weight.dtype))


class Matrix(NamedTuple):
    """An adapted matrix."""

    name: str  # in the state dict of open_clip's model
    path: str  # of its parametrization in the model
    layer: str  # its name


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model."""

    matrices: tuple[Matrix, ...]
    config: Mapping[str, Any]  # peft's configuration
    digest: str  # SHA-256 of the frozen matrices, as they were loaded

    @classmethod
    def add(
        cls,
        clip: nn.Module,
        wanted: Mapping[Tower, LoraSettings],
        *,
        seed: int,
        base: str,
        tokenizer: Callable[[], Callable[[list[str]], torch.Tensor]],
    ) -> Adapters:
        """Give layers of open_clip's model adapters, which change none of its features yet.

        Args:
            wanted: settings of the towers that get adapters.
            seed: of the initial values, which depend on it alone.
            base: name of the model, for peft's configuration.
            tokenizer: loads the model's, as open_clip has it.

        Raises SettingsError: no layer has a wanted name, a rank is larger than a matrix, peft has no such adapter, or
        a file of tokens cannot be read.
        """
        generator = torch.Generator().manual_seed(seed)
        matrices: list[Matrix] = []
        found = {tower: dict(_select_layers(clip, tower, settings)) for tower, settings in wanted.items()}
        rows = dict(_rows(clip, wanted, tokenizer))
        pairs = [pair for layers in found.values() for pair in layers.items()]
        pairs += [(name, clip.get_submodule(name)) for name in rows]
        tokens = {name: part.tokens for name, part in rows.items()}
        digest = weights_digest([*((name, getattr(layer, _matrix(layer))) for name, layer in pairs), *tokens.items()])
        for tower, settings in wanted.items():
            for name, layer in found[tower].items():
                own = _matrix(layer)
                shape = getattr(layer, own).flatten(1).shape
                if settings.rank > (most := min(shape)):
                    what = f"{settings.rank} is larger than {name}.{own}, a matrix of {' x '.join(map(str, shape))}"
                    raise SettingsError(f"model.{tower}.lora.rank: {what}: use at most {most}, or other targets")
                matrices.append(_register(name, layer, LowRank(layer, settings, generator)))
        matrices += [_register(name, clip.get_submodule(name), part) for name, part in rows.items()]
        config = _config(wanted, found, base)
        if tokens:
            config["trainable_token_indices"] = {name: ids.tolist() for name, ids in tokens.items()}
        return cls(tuple(matrices), config, digest)

    def _parts(self, clip: nn.Module) -> Iterator[tuple[Matrix, Any, nn.Parameter]]:
        """Each matrix with its adapter and its frozen weight."""
        for matrix in self.matrices:
            parts: Any = clip.get_submodule(matrix.path)
            yield matrix, parts[0], parts.original

    def _names(self, clip: nn.Module) -> dict[str, str]:
        """The names of the parameters in the model -> in peft's files."""
        own = ((matrix, name) for matrix, part, _ in self._parts(clip) for name, _ in part.named_parameters())
        return {f"{matrix.path}.0.{name}": f"base_model.model.{matrix.layer}.{PARTS[name]}" for matrix, name in own}

    def tensors(self, clip: nn.Module, instead: Tensors | None = None) -> dict[str, torch.Tensor]:
        """The content of adapter_model.safetensors, with values `instead` of parameters, by name in the towers; sharded
        tensors stay sharded.
        """
        values = {name.removeprefix("clip."): tensor for name, tensor in (instead or {}).items()}
        own = {**dict(clip.named_parameters()), **values}
        found = {file: own[name] for name, file in self._names(clip).items()}
        for matrix, part, weight in self._parts(clip):
            if matrix.name.endswith("in_proj_weight"):
                shapes = {"lora_A": part.lora_A.shape, "lora_B": (weight.shape[1], part.lora_A.shape[0])}
                for one, shape in shapes.items():
                    zeros = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
                    found[f"base_model.model.{matrix.layer}{_OUT}.{PARTS[one]}"] = zeros
        return found

    @torch.no_grad()
    def merge(self, clip: nn.Module, instead: Tensors) -> dict[str, torch.Tensor]:
        """The matrices by name in the state dict, with values `instead` of parameters, by name in the towers."""
        found = {}
        for matrix, part, weight in self._parts(clip):
            values = (instead.get(f"clip.{matrix.path}.0.{name}", own) for name, own in part.named_parameters())
            found[matrix.name] = part.merge(weight, *values)
        return found

    def wide(self, clip: nn.Module) -> set[int]:
        """The ids of the parameters that a matrix is summed of, and which must not be rounded before."""
        return {id(own) for _, part, weight in self._parts(clip) for own in (weight, *part.parameters())}

    def files(self) -> dict[str, bytes]:
        """The files beside the tensors, by name."""
        text = json.dumps(self.config, indent=2) + "\n"
        return {CONFIG: text.encode(), DIGEST: f"{self.digest}\n".encode()}

    def read(self, folder: Path, clip: nn.Module) -> dict[str, torch.Tensor]:
        """The parameters of the adapters that a checkpoint has, by name in the model.

        Raises SettingsError: the checkpoint has none, or others, or those of other weights.
        """
        again = "resume with the settings of the run's config.yaml, or start a new run"
        try:
            saved, digest = load_file(folder / WEIGHTS), (folder / DIGEST).read_text().strip()
        except (OSError, SafetensorError) as error:
            raise SettingsError(f"{folder.parent} has no adapter ({error}): {again} from its weights") from error
        if digest != self.digest:
            what = "its adapter belongs to other weights than those that the run starts from, or to other tokens"
            advice = f"set model.pretrained to the weights that the run began with, or {again}"
            raise SettingsError(f"{folder.parent}: {what} (their digests differ): {advice}")
        own, names = dict(clip.named_parameters()), self._names(clip)
        found = {name: tensor.shape for name, tensor in saved.items() if _OUT not in name}
        if {file: own[name].shape for name, file in names.items()} != found:
            raise SettingsError(f"{folder.parent}: its adapter has other layers or another rank: {again}")
        checked = dict(check_finite(saved.items(), folder / WEIGHTS))
        return {name: checked[file] for name, file in names.items()}

    def in_place_of(
        self, saved: Iterable[tuple[str, torch.Tensor]], folder: Path, clip: nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a checkpoint's model by their names in this one: the parts of adapted matrices, which
        `read` takes from the folder of its adapter.
        """
        merged = {matrix.name for matrix in self.matrices}
        yield from self.read(folder, clip).items()
        yield from ((f"{matrix.path}.original", weight.detach()) for matrix, _, weight in self._parts(clip))
        yield from ((name, tensor) for name, tensor in saved if name not in merged)


def _merge(module: Any, state: dict[str, torch.Tensor], prefix: str, _: object) -> None:
    """Hook of a layer's state dict: the merged matrix in place of its parts."""
    for name, parts in module.parametrizations.items():
        inner = f"{prefix}parametrizations.{name}"
        values = [state.pop(f"{inner}.0.{own}") for own, _ in parts[0].named_parameters()]
        with torch.no_grad():
            state[prefix + name] = parts[0].merge(state.pop(f"{inner}.original"), *values)


def _register(name: str, layer: nn.Module, part: nn.Module) -> Matrix:
    own = _matrix(layer)
    parametrize.register_parametrization(layer, own, part)
    getattr(layer.parametrizations, own).original.requires_grad_(False)
    layer._register_state_dict_hook(_merge)  # type: ignore[no-untyped-call]
    return Matrix(f"{name}.{own}", f"{name}.parametrizations.{own}", name)


def _rows(
    clip: nn.Module, wanted: Mapping[Tower, LoraSettings], tokenizer: Callable[[], Callable[[list[str]], torch.Tensor]]
) -> Iterator[tuple[str, TokenRows]]:
    """The trained rows of towers by name of the embedding, which is the tower's first one."""
    for tower, settings in wanted.items():
        if settings.tokens is None:
            continue
        key, own = f"model.{tower}.lora.tokens", members(clip, tower)
        layers = (pair for pair in clip.named_modules() if pair[0].partition(".")[0] in own)
        name, layer = next(((name, layer) for name, layer in layers if isinstance(layer, nn.Embedding)), (None, None))
        if name is None or layer is None:
            raise SettingsError(f"{key}: the {tower} tower has no embedding of tokens: remove this setting")
        with errors_as(SettingsError, f"{key}: {settings.tokens} cannot be read as text", OSError, UnicodeError):
            words = sorted(set(re.split(r'[\s,"]+', Path(settings.tokens).read_text(encoding="utf-8"))))
        yield name, TokenRows(layer.weight, torch.unique(tokenizer()(words)).long())


def _matrix(layer: nn.Module) -> str:
    """The name in a layer of the matrix that is adapted."""
    return "in_proj_weight" if isinstance(layer, nn.MultiheadAttention) else "weight"


def _layers(clip: nn.Module, tower: Tower, settings: LoraSettings) -> dict[str, nn.Module]:
    """The layers of a tower that can have an adapter, by name."""
    own, found, inside = members(clip, tower), {}, set[int]()
    for name, module in clip.named_modules():
        if name.partition(".")[0] not in own:
            continue
        if isinstance(module, nn.MultiheadAttention | AttentionPool2d):  # which read the weights of their parts
            inside.update(map(id, module.modules()))
            if getattr(module, "_qkv_same_embed_dim", False):
                found[name] = module
        else:
            convolution = isinstance(module, nn.Conv2d) and module.groups == 1 and not settings.dora
            if convolution or (isinstance(module, nn.Linear) and id(module) not in inside):
                found[name] = module
    return found


def _select_layers(clip: nn.Module, tower: Tower, settings: LoraSettings) -> Iterator[tuple[str, nn.Module]]:
    """The layers that get an adapter, by name."""
    layers, key = _layers(clip, tower, settings), f"model.{tower}.lora"
    if not layers:
        raise SettingsError(f"{key}: the {tower} tower has no layer that takes an adapter")
    if isinstance(settings.targets, str):
        repeated = {id(part) for block in blocks(clip) for part in block.modules()}
        names = [name for name in layers if re.search(r"attn|attention", name.lower())]
        if settings.targets == "all":
            inner = [name for name, layer in layers.items() if name in names or id(layer) in repeated]
            names = inner or list(layers)  # a ResNet with one block in each of its layers
        unmatched: Iterable[str] = () if names else (settings.targets,)
    else:
        names = [name for name in layers if any(fnmatchcase(name, pattern) for pattern in settings.targets)]
        unmatched = (one for one in settings.targets if not any(fnmatchcase(name, one) for name in names))
    if (pattern := next(iter(unmatched), None)) is not None:
        shown = ", ".join(sorted({re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in layers})[:8])
        what = f"no layer of the {tower} tower matches {pattern}"
        raise SettingsError(f"{key}.targets: {what}; its layers are {shown}")
    for name in names:
        if settings.dora and isinstance(layers[name], nn.MultiheadAttention):
            advice = "set dora: false, or targets to other layers, such as '*.mlp.*'"
            raise SettingsError(f"{key}.dora: peft has no DoRA for {name}, a MultiheadAttention of torch: {advice}")
        yield name, layers[name]


def _config(wanted: Mapping[Tower, LoraSettings], found: Mapping[Tower, Iterable[str]], base: str) -> dict[str, Any]:
    """peft's configuration. Its patterns match ends of names; `(?<!.)` keeps them to whole ones."""
    exact = {tower: f"(?<!.)(?:{'|'.join(map(re.escape, names))})" for tower, names in found.items()}
    first = next(iter(wanted.values()))
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": first.rank,
        "lora_alpha": first.scale * first.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_dora": any(settings.dora for settings in wanted.values()),
        "target_modules": "|".join(exact.values()),
        "rank_pattern": {exact[tower]: settings.rank for tower, settings in wanted.items()},
        "alpha_pattern": {exact[tower]: settings.scale * settings.rank for tower, settings in wanted.items()},
    }
