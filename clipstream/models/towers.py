"""The model: open_clip's two towers, from uint8 pixels and token ids to features, and its saved form."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from safetensors.torch import save_file
from timm.layers import to_2tuple
from torch import nn

from clipstream.data.batch import ImageSpec
from clipstream.errors import SettingsError, errors_as
from clipstream.features.manifest import decode_rows
from clipstream.models.adapters import Adapters
from clipstream.models.execution.text_buckets import Lengths, TextBuckets
from clipstream.models.frozen import FrozenTower, StoredTower, arithmetic, members
from clipstream.models.layers import ChannelsLast, batch_norms, tower_parameters
from clipstream.models.model_config import CONFIG_FILE, WEIGHT_FILES, ModelConfig
from clipstream.models.pretrained import TEXT_CONFIG, TOKENIZER_CONFIG
from clipstream.models.settings import TOWERS, FrozenPrecision, LoraSettings, Tower
from clipstream.utils.plugins import untrusted_code_message
from clipstream.utils.timing import IMAGE_FORWARD, TEXT_FORWARD, begin

_NO_LOCK = (AssertionError, RuntimeError, AttributeError, KeyError)  # what open_clip's towers raise


class Features(NamedTuple):
    """Input of a loss: one rank's features and the two scalars of the logits `scale * image @ text.T + bias`."""

    image: torch.Tensor  # [n, D], rows of length 1, float32 (float64 if the parameters are)
    text: torch.Tensor  # [n, D], likewise; [n, M D] of M texts of a sample
    logit_scale: torch.Tensor  # scalar, exp of the parameter
    logit_bias: torch.Tensor | None  # scalar; None for models of the softmax loss


@dataclass
class Lock:
    """Names of the parameters that are not trained, and of the modules that stay in evaluation mode with them.

    A lock without `until` is closed for good. One with it is made open, so that optimizer, averages and sharding take
    the parameters; `Towers.toggle` closes it.
    """

    parameters: list[str]
    modules: list[str]
    until: int | None = None  # number of steps (of the run) after which the parameters are trained
    closed: bool = True


class Towers(nn.Module):
    """An image and a text tower of open_clip behind one forward.

    Attributes:
        clip: open_clip's CLIP or CustomTextCLIP.
        image: how an image is decoded to pixels, before normalisation.
        context_length: tokens per caption, T.
        vocab_size: number of token ids.
        loss_type: 'clip' or 'siglip', the loss that the model has parameters for (siglip: a logit bias).
        config: open_clip's configuration of exactly this model.
        tokenizer_folder: folder of a Hugging Face tokenizer; None for open_clip's own BPE.
        stored: towers that are absent, as their features come from a store.
        text_buckets: how texts are cut into buckets by length; None for passes over padded texts.
        channels_last: how the image tower takes its pixels; None for contiguous ones.
        own_precision: frozen towers in a precision of their own.
        adapters: of the towers that train adapters alone.
    """

    clip: Any
    mean: torch.Tensor
    std: torch.Tensor

    def __init__(
        self,
        clip: Any,
        config: ModelConfig,
        *,
        loss_type: str,
        tokenizer_folder: Path | None = None,
        trust_remote_code: bool = False,
        text_buckets: TextBuckets | None = None,
        channels_last: ChannelsLast | None = None,
    ) -> None:
        super().__init__()
        self.clip = clip
        self.config: ModelConfig = config
        self.loss_type: str = loss_type
        self.tokenizer_folder: Path | None = tokenizer_folder
        preprocess, text_cfg = config.preprocess_cfg, config.model_cfg["text_cfg"]
        size = preprocess["size"]
        self.image: ImageSpec = ImageSpec(
            size=to_2tuple(size),
            interpolation=preprocess["interpolation"],
            resize_mode=preprocess["resize_mode"],
            fill=preprocess["fill_color"],
            floor_crop=preprocess.get("floor_crop", False),
        )
        self.context_length: int = int(text_cfg.get("context_length", 77))
        self.vocab_size: int = int(self.clip.vocab_size)
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(preprocess[name]).view(1, 3, 1, 1).clone(), persistent=False)
        self.stored: dict[Tower, StoredTower] = {}
        self.text_buckets = text_buckets
        self.channels_last = channels_last
        self.own_precision: dict[Tower, FrozenTower] = {}
        self.adapters: Adapters | None = None
        self._locks: list[Lock] = []
        self._text_config = getattr(getattr(clip, "text", None), "config", None)  # of a Hugging Face text tower
        self._tokenizer: Any = None
        self._trust_remote_code = trust_remote_code

    def forward(
        self, images: torch.Tensor, texts: torch.Tensor, lengths: Lengths | None = None, known: Collection[Tower] = ()
    ) -> Features:
        """A batch's `images` and `texts` -> Features. All trainable parameters take part, as DDP requires.

        Args:
            images: uint8 [n, 3, H, W]; rows of a store (see `features.manifest`) where the image tower is stored.
            texts: int [n, T], or [n, M T] of M texts of an image, with features [n, M D]; rows of a store where
                the text tower is stored.
            lengths: as `encode_text` takes them.
            known: towers that do not run, as their argument is their features.
        """
        if "image" in known:
            image = images
        else:
            begin(IMAGE_FORWARD)
            image = self._from_store(images) if "image" in self.stored else self.encode_image(images)
        if "text" in known:
            text = texts
        else:
            begin(TEXT_FORWARD)
            text = self._from_store(texts) if "text" in self.stored else self._encode_texts(texts, lengths)
        return Features(image, text, *self.scalars())

    def _encode_texts(self, ids: torch.Tensor, lengths: Lengths | None) -> torch.Tensor:
        """As `encode_text`, for int [n, M T] -> [n, M D]; `lengths` are n M."""
        if ids.shape[1] <= self.context_length:
            return self.encode_text(ids, lengths)
        features = self.encode_text(ids.reshape(-1, self.context_length), lengths)
        return features.view(len(ids), -1)

    def _from_store(self, rows: torch.Tensor) -> torch.Tensor:
        return self._unit(decode_rows(rows))

    def _arithmetic(self, tower: Tower) -> AbstractContextManager[None]:
        """The context of a tower's pass: that of the caller, or the tower's own precision."""
        if (own := self.own_precision.get(tower)) is None:
            return nullcontext()
        return arithmetic(self.mean.device.type, own.dtype, cast=False)

    def _unit(self, features: torch.Tensor) -> torch.Tensor:
        """Normalize rows to length 1, in float32 under any autocast, or in float64 if the model is."""
        wide = torch.promote_types(self.mean.dtype, torch.float32)
        return F.normalize(features.to(torch.promote_types(features.dtype, wide)), dim=-1)

    def zeros(self, n: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Input of `forward` without content, for n samples."""
        rows = torch.zeros(n, int(self.config.model_cfg["embed_dim"]), device=device)
        pixels = torch.zeros(n, 3, *self.image.size, dtype=torch.uint8, device=device)
        ids = torch.zeros(n, self.context_length, dtype=torch.int32, device=device)
        return rows if "image" in self.stored else pixels, rows if "text" in self.stored else ids

    def scalars(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """exp(logit_scale), and the bias of the logits, if the model has one."""
        bias = self.clip.logit_bias
        # sum() of a single number, as FSDP cannot track a view of it.
        return self.clip.logit_scale.exp().sum(), None if bias is None else bias.sum()

    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 [n, 3, H, W] -> L2-normalised [n, D]; same arithmetic as torchvision's ToTensor and Normalize, on
        a GPU as one product and sum in float32.
        """
        dtype = next(self.clip.visual.parameters()).dtype
        wide = torch.promote_types(dtype, torch.float32)
        if self.channels_last is not None:
            pixels = self.channels_last.apply(pixels, dtype)
        mean, std = self.mean.to(wide), self.std.to(wide)
        if pixels.is_cuda and wide == torch.float32:
            scaled = torch.addcmul(-mean / std, pixels, 1 / (255 * std))  # one kernel, which converts bytes as it goes
        else:  # division converts bytes to float32 as it goes
            scaled = (pixels.to(wide) if wide == torch.float64 else pixels).div(255).sub_(mean).div_(std)
        return self.encode_normalized(scaled.to(dtype))

    def encode_normalized(self, images: torch.Tensor) -> torch.Tensor:
        """Images [n, 3, H, W] in the dtype of the weights, normalised by mean and std -> L2-normalised [n, D]."""
        with self._arithmetic("image"):
            return self._unit(self.clip.encode_image(images))

    def encode_text(self, ids: torch.Tensor, lengths: Lengths | None = None) -> torch.Tensor:
        """int [n, T] -> L2-normalised [n, D]. Without lengths, of `text_lengths`, they are counted here where ids are
        on the CPU, which are moved to the model's device then; texts on another device are padded.
        """
        if self.text_buckets is None or not len(ids):
            with self._arithmetic("text"):
                return self._unit(self.clip.encode_text(ids.to(self.mean.device)))
        if lengths is None and (lengths := self.text_buckets.lengths(ids)) is None:
            lengths = (ids.shape[1],) * len(ids)
        with self._arithmetic("text"):
            return self._unit(self.text_buckets.encode(self.clip, ids.to(self.mean.device), lengths))

    def text_lengths(self, ids: torch.Tensor) -> tuple[Any, ...] | None:
        """True lengths in tokens of ids [n, T] on the CPU, of [n, M T] tuples of M; None without buckets, or for ids on
        another device.
        """
        if self.text_buckets is None or "text" in self.stored:
            return None
        if ids.shape[1] <= self.context_length:
            return self.text_buckets.lengths(ids)
        found = self.text_buckets.lengths(ids.reshape(-1, self.context_length))
        count = ids.shape[1] // self.context_length
        return None if found is None else tuple(zip(*(found[number::count] for number in range(count)), strict=True))

    def train(self, mode: bool = True) -> Towers:
        """See nn.Module.train; locked towers stay in evaluation mode: no dropout, no update of batch statistics."""
        super().train(mode)
        for name in (name for lock in self._locks if lock.closed for name in lock.modules):
            self.get_submodule(name).eval()
        return self

    def tower(self, tower: Tower) -> nn.Module:
        """The module of a tower's blocks; of open_clip's CLIP, which has no text tower of its own, the transformer."""
        clip = self.clip
        module: nn.Module = clip.visual if tower == "image" else getattr(clip, "text", None) or clip.transformer
        return module

    @property
    def n_parameters(self) -> int:
        """Number of parameters, trained or frozen."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def has_batch_norm(self) -> bool:
        """Whether a sample's features depend, in some step, on the other samples of its micro-batch."""
        return not self.frozen.issuperset(batch_norms(self))

    @property
    def frozen(self) -> set[nn.Module]:
        """The modules that no step trains."""
        names = [name for lock in self._locks if lock.until is None for name in lock.modules]
        return {module for name in names for module in self.get_submodule(name).modules()}

    def unchanging(self) -> frozenset[Tower]:
        """Towers whose features stay the same in a step: present, without trained parameters, in evaluation mode."""
        found: set[Tower] = set()
        for tower in TOWERS:
            trained = any(parameter.requires_grad for _, parameter in tower_parameters(self.clip, tower))
            if tower not in self.stored and not trained and not self.tower(tower).training:
                found.add(tower)
        return frozenset(found)

    def lock_image(self, unlocked_groups: int = 0, *, until: int | None = None) -> None:
        """Freeze the image tower and its projection (LiT, arXiv:2111.07991), except its last groups, for good or for
        `until` steps (see `changing_locks`).

        Raises SettingsError: the tower has no groups to leave unlocked.
        """
        before = self._trainable()
        if unlocked_groups:
            with errors_as(SettingsError, "model.unlocked_groups: this image tower has none to unlock", *_NO_LOCK):
                self.clip.visual.lock(unlocked_groups=unlocked_groups)
        else:
            self.clip.visual.requires_grad_(False)
        self._add_lock(before, self.clip.visual, until)

    def lock_text(self, unlocked_layers: int = 0, *, keep_projection: bool = False, until: int | None = None) -> None:
        """Freeze the text tower except its last layers, for good or for `until` steps (see `changing_locks`); keep the
        projection trainable where it is new, on top of a Hugging Face base model.

        Raises SettingsError: the tower has no layers to leave unlocked.
        """
        before = self._trainable()
        if unlocked_layers:
            with errors_as(SettingsError, "model.unlocked_layers: this text tower has none to unlock", *_NO_LOCK):
                self.clip.lock_text_tower(unlocked_layers=unlocked_layers)
        else:
            for name, parameter in tower_parameters(self.clip, "text"):
                parameter.requires_grad_(keep_projection and name.startswith("text.proj"))
        whole = None if unlocked_layers else self.tower("text")  # in evaluation mode, but for the projection
        self._add_lock(before, self.tower("text"), until, whole)

    def adapt(self, wanted: Mapping[Tower, LoraSettings], *, seed: int, base: str, heads: Collection[str] = ()) -> None:
        """Give towers adapters, and freeze all else that is trained but scale and bias of the logits.

        Args:
            wanted: the settings by tower; a tower without is frozen, or, if it is locked already, stays as it is.
            seed: of the initial values.
            base: name of the model, for peft's configuration.
            heads: beginnings of the names, in the model, of parameters that are new, and are trained.

        Raises SettingsError: as `Adapters.add`.
        """
        before, locked = self._trainable(), bool(self._locks)
        self.adapters = Adapters.add(self.clip, wanted, seed=seed, base=base, tokenizer=self.open_clip_tokenizer)
        own = self.adapters.tensors(self.clip)
        for tower in TOWERS if not locked else wanted:
            for name, parameter in tower_parameters(self.clip, tower):
                adapts = any(parameter is one for one in own.values())
                parameter.requires_grad_(adapts or name.startswith(tuple(heads)))
            self._add_lock(before, self.tower(tower), None)

    def set_precision(self, tower: Tower, precision: FrozenPrecision, *, keep: bool = True) -> None:
        """Convert a frozen tower to a precision of its own, in which it is stored and computed from now on. With
        `keep`, `saved_tensors` gives the weights as they are now; without, it leaves them out.

        Raises SettingsError: the tower has parameters that are trained.
        """
        if trained := [name for name, parameter in tower_parameters(self.clip, tower) if parameter.requires_grad]:
            what = f"{trained[0]} of the {tower} tower is trained, which requires train.precision"
            raise SettingsError(f"model.{tower}.precision: {what}: remove this setting")
        self.own_precision[tower] = FrozenTower(self.clip, members(self.clip, tower), precision, keep=keep)

    def changing_locks(self, step: int) -> list[Lock]:
        """The open locks that last longer than `step` steps of the run, and the closed ones that do not."""
        return [lock for lock in self._locks if lock.until is not None and lock.closed != (step < lock.until)]

    def toggle(self, locks: Iterable[Lock]) -> None:
        """Close the open ones of these locks, and open the closed ones."""
        for lock in locks:
            lock.closed = not lock.closed
            for name in lock.parameters:
                self.get_parameter(name).requires_grad_(not lock.closed)
        self.train(self.training)

    def _trainable(self) -> list[str]:
        return [name for name, parameter in self.named_parameters() if parameter.requires_grad]

    def _add_lock(self, before: list[str], tower: nn.Module, until: int | None, whole: nn.Module | None = None) -> None:
        """Add the lock of those parameters of `before` that are frozen now, with the wholly frozen modules of a tower,
        or `whole`.
        """
        left, modules = set(self._trainable()), _wholly_frozen(tower) if whole is None else [whole]
        names = [name for name, module in self.named_modules() if module in modules]
        lock = Lock([name for name in before if name not in left], names, until, closed=until is None)
        for name in () if lock.closed else lock.parameters:
            self.get_parameter(name).requires_grad_(True)
        self._locks.append(lock)
        self.train(self.training)

    def remove(self, tower: Tower, weights: Path) -> None:
        """Remove a tower whose features come from a store. Raises SettingsError: as StoredTower, or it is trained
        later.
        """
        self.stored[tower] = StoredTower(self.clip, tower, weights)
        modules, parameters = dict(self.named_modules()), dict(self.named_parameters())
        for lock in self._locks:
            if lock.until is not None and not parameters.keys() >= set(lock.parameters):
                why = "a tower whose features come from a store cannot be trained"
                raise SettingsError(f"model.unlock_{tower}_at: {why}: remove the store or this setting")
            lock.modules = [name for name in lock.modules if name in modules]
            lock.parameters = [name for name in lock.parameters if name in parameters]

    @contextmanager
    def whole(self, device: str) -> Iterator[Towers]:
        """A context in which the stored towers are part of the model, on a device."""
        for tower in self.stored.values():
            tower.restore(self.clip, device)
        try:
            yield self
        finally:
            for tower in self.stored.values():
                tower.remove(self.clip)

    def saved_tensors(self, instead: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """open_clip's state dict, with values `instead` of parameters by name in the towers, with the weights of stored
        towers, the original ones of `set_precision`, and adapters merged; sharded tensors stay sharded.
        """
        present: dict[str, torch.Tensor] = self.clip.state_dict()
        if instead is not None:
            values = {name.removeprefix("clip."): tensor for name, tensor in instead.items()}
            present |= {name: tensor for name, tensor in values.items() if name in present}
            present |= {} if self.adapters is None else self.adapters.merge(self.clip, instead)
        for frozen in self.own_precision.values():
            present = frozen.with_originals(present)
        return present | {name: tensor for stored in self.stored.values() for name, tensor in stored.tensors()}

    def skip_stored(self, saved: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a checkpoint that are not those of stored towers, to be loaded into `clip`.

        Raises SettingsError: the checkpoint's tower differs from the store's.
        """
        stored = {name: (tower, tensor) for tower in self.stored.values() for name, tensor in tower.tensors()}
        for name, tensor in saved:
            if name not in stored:
                for frozen in self.own_precision.values():
                    frozen.load(name, tensor)
                yield name, tensor
                continue
            tower, own = stored[name]
            if own.shape != tensor.shape or not torch.equal(own.to(tensor.dtype), tensor):
                raise SettingsError(
                    f"the checkpoint's {tower.tower} tower is not the one of the feature store ({tower.weights}): "
                    f"{name} differs; compute the features again from the checkpoint, or train without the store"
                )

    def open_clip_tokenizer(self) -> Any:
        """The model's tokenizer as open_clip.get_tokenizer builds it: texts -> int64 [n, T].

        Read once, as the folder may be gone when a checkpoint is written hours later.

        Raises SettingsError: the tokenizer's files cannot be read.
        """
        if self._tokenizer is not None:
            return self._tokenizer
        text_cfg, folder = self.config.model_cfg["text_cfg"], self.tokenizer_folder
        options = {**(text_cfg.get("tokenizer_kwargs") or {}), "context_length": self.context_length}
        if folder is None:
            options.pop("trust_remote_code", None)
            self._tokenizer = SimpleTokenizer(**options)
            return self._tokenizer
        options |= {"tokenizer_mode": text_cfg.get("tokenizer_mode"), "trust_remote_code": self._trust_remote_code}
        try:
            found = HFTokenizer(str(folder), **options)
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            text = untrusted_code_message(folder, error) or f"cannot load the tokenizer in {folder}: {error}"
            raise SettingsError(text) from error
        if getattr(found.tokenizer, "pad_token", None) is None:
            raise SettingsError(f"the tokenizer in {folder} has no pad token: set pad_token in its {TOKENIZER_CONFIG}")
        self._tokenizer = found
        return found

    def same_tokenizer(self, other: Towers) -> bool:
        """Whether both models' own tokenizers are certain to give the same ids; those of unlike folders may."""
        text_cfgs = [towers.config.model_cfg["text_cfg"] for towers in (self, other)]
        keys = ("hf_tokenizer_name", "tokenizer_kwargs", "tokenizer_mode")
        same = all((text_cfgs[0].get(key) or None) == (text_cfgs[1].get(key) or None) for key in keys)
        return same and (self.tokenizer_folder, self.context_length) == (other.tokenizer_folder, other.context_length)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a folder from which open_clip rebuilds model, preprocessing and tokenizer ('local-dir:FOLDER')."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for name, tensor in self.clip.state_dict().items():
            # safetensors refuses tensors that share memory (tied embeddings of some text towers).
            shared = tensor.untyped_storage().data_ptr() in seen
            seen.add(tensor.untyped_storage().data_ptr())
            tensors[name] = (tensor.detach().clone() if shared else tensor.detach()).contiguous()
        save_file(tensors, folder / WEIGHT_FILES[0], metadata={"format": "pt"})
        for name, content in self.description().items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        with suppress(OSError):  # a file system without modes
            shutil.copymode(folder / CONFIG_FILE, folder / WEIGHT_FILES[0])  # that of safetensors is its owner's alone

    def description(self) -> dict[str, bytes]:
        """The files of `save_pretrained` besides the weights, by name: configuration and tokenizer."""
        files = {CONFIG_FILE: (json.dumps(asdict(self.config), indent=2) + "\n").encode()}
        if self.tokenizer_folder is not None:
            with tempfile.TemporaryDirectory() as name:
                self.open_clip_tokenizer().save_pretrained(name)
                folder = Path(name)
                files |= {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        if self._text_config is not None:
            files[TEXT_CONFIG] = self._text_config.to_json_string().encode()
        return files


def _wholly_frozen(module: nn.Module) -> list[nn.Module]:
    """The outermost modules with parameters, all of them frozen."""
    parameters = list(module.parameters())
    if not parameters:
        return []
    if not any(parameter.requires_grad for parameter in parameters):
        return [module]
    return [frozen for child in module.children() for frozen in _wholly_frozen(child)]
