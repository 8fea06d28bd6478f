"""Features that frozen towers add to a batch: of a tower of the model, computed once for each input, or of a teacher.

Cached features are found by two 64-bit hashes of the bytes of pixels or token ids. The features of a sample are the
same bits until the process ends, whatever the order of samples; a resumed run computes them anew, beside other samples,
which may round otherwise. Ranks exchange what they compute: all hold the same features. Nothing is removed; when the
limit is reached, further features are computed each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from clipstream.data.batch import Batch
from clipstream.distributed.world import World
from clipstream.errors import SettingsError
from clipstream.models.settings import TOWERS, ModelSettings, Tower
from clipstream.models.towers import Towers
from clipstream.utils.logs import logger
from clipstream.utils.timing import IMAGE_FORWARD, TEXT_FORWARD, time_part

ENTRY = 256  # bytes of a row in the table of keys, about
ROWS = {"cpu": 4, "cuda": 256}  # that are hashed at a time: they fit into a core's cache, or make few kernels


class FeatureCache:
    """Callable that adds the features of a frozen tower to a batch.

    Args:
        towers: on their device, in training.
        gib: memory for features and keys of this rank, in GiB.
        context: returns the context of a forward pass.

    Raises SettingsError: the tower has parameters that are trained.
    """

    def __init__(
        self,
        towers: Towers,
        tower: Tower,
        gib: float,
        world: World,
        context: Callable[[], AbstractContextManager[None]],
    ) -> None:
        if tower not in towers.unchanging():
            text = f"the {tower} tower is trained, so its features change: remove it"
            raise SettingsError(f"model.{tower}.cache_gib: {text}")
        self.towers, self.tower, self.world, self.context, self.gib = towers, tower, world, context, gib
        dtype = torch.promote_types(towers.mean.dtype, torch.float32)
        width = int(towers.config.model_cfg["embed_dim"])
        self.capacity = int(gib * (1 << 30)) // (width * dtype.itemsize + ENTRY)
        self._rows = torch.empty(self.capacity, width, dtype=dtype)  # the system gives memory when rows are written
        self._places: dict[tuple[int, int], int] = {}
        self._multipliers = torch.empty(0)

    def summary(self) -> str:
        return f"{self.capacity:,} features of the {self.tower} tower in {self.gib:g} GiB a rank"

    def __len__(self) -> int:
        return len(self._places)

    @torch.no_grad()
    def __call__(self, batch: Batch, size: int | None = None) -> Batch:
        """The batch on its device with the tower's features, which takes no gradient, in passes of `size` samples (None
        for all). Collective until it is full.
        """
        inputs = batch.pixels if self.tower == "image" else batch.ids
        assert inputs is not None, "the tower is there, and so is its input"
        keys = self._keys(inputs)
        places = [self._places.get(key, -1) for key in keys]
        new = [row for row, place in enumerate(places) if place < 0]
        old = [row for row, place in enumerate(places) if place >= 0]
        rows = self._rows.new_empty(len(keys), self._rows.shape[1], device=inputs.device)
        if old:
            rows[torch.tensor(old).to(rows.device)] = self._rows[[places[row] for row in old]].to(rows.device)
        computed = self._compute(inputs, batch.lengths, new, size or len(keys)) if new else rows[:0]
        if new:
            rows[torch.tensor(new).to(rows.device)] = computed
        if len(self) < self.capacity:
            self._share([keys[row] for row in new], computed)
        return replace(batch, features={**batch.features, self.tower: rows}, known=(*batch.known, self.tower))

    def _compute(self, inputs: torch.Tensor, lengths: Sequence[Any] | None, new: list[int], size: int) -> torch.Tensor:
        found = []
        for start in range(0, len(new), size):
            some = new[start : start + size]
            rows = inputs if len(some) == len(inputs) else inputs[torch.tensor(some).to(inputs.device)]
            with self.context(), time_part(IMAGE_FORWARD if self.tower == "image" else TEXT_FORWARD):
                if self.tower == "image":
                    found.append(self.towers.encode_image(rows))
                else:
                    own = None if lengths is None else tuple(lengths[row] for row in some)
                    found.append(self.towers.encode_text(rows, own))
        return torch.cat(found)

    def _share(self, keys: list[tuple[int, int]], rows: torch.Tensor) -> None:
        """Keep the new rows of all ranks, in the same order on each."""
        counts = self.world.gather_objects(len(keys))
        if not sum(counts):
            return
        names = torch.tensor(keys, dtype=torch.int64).view(-1, 2).to(rows.device)
        all_keys = [(first, second) for first, second in self.world.gather_rows(names, counts).tolist()]
        all_rows = self.world.gather_rows(rows, counts).to("cpu")
        first_rows: dict[tuple[int, int], int] = {}
        for row, key in enumerate(all_keys):
            if key not in self._places:
                first_rows.setdefault(key, row)
        kept, free = dict(islice(first_rows.items(), self.capacity - len(self))), len(self)
        self._rows[free : free + len(kept)] = all_rows[list(kept.values())]
        self._places.update(zip(kept, range(free, free + len(kept)), strict=True))
        if len(self) == self.capacity and self.world.is_main:
            full = f"full with {len(self):,} features; those of other samples are computed each time"
            logger.info(f"model.{self.tower}.cache_gib: {full}")

    def _keys(self, inputs: torch.Tensor) -> list[tuple[int, int]]:
        """Two hashes of each row: sums of its 32-bit words times random numbers, modulo 2^64 (multilinear hashing,
        Carter and Wegman 1979).
        """
        words = -(-inputs[0].numel() * inputs.element_size() // 4)
        if self._multipliers.shape[-1] != words:
            draw = torch.Generator().manual_seed(0)
            least, most = -(2**63), 2**63 - 1
            drawn = torch.randint(least, most, (2, words), dtype=torch.int64, generator=draw)
            self._multipliers = drawn.to(inputs.device)
        found = []
        for part in torch.split(inputs, ROWS.get(inputs.device.type, 256)):
            flat = part.reshape(len(part), -1).contiguous().view(torch.uint8)
            flat = torch.nn.functional.pad(flat, (0, 4 * words - flat.shape[1]))
            values = flat.view(torch.int32).long()
            found.append(torch.stack([(values * one).sum(1) for one in self._multipliers], dim=1))
        return [(first, second) for first, second in torch.cat(found).tolist()]


def caches_of(
    towers: Towers, settings: ModelSettings, world: World, context: Callable[[], AbstractContextManager[None]]
) -> list[FeatureCache]:
    """The caches that the settings ask for; arguments and errors are those of FeatureCache."""
    wanted = {tower: getattr(settings, tower).cache_gib for tower in TOWERS if tower not in towers.stored}
    return [FeatureCache(towers, tower, gib, world, context) for tower, gib in wanted.items() if gib is not None]


NAME = "teacher"  # of its features in a batch


class Teacher:
    """Callable that adds the teacher's L2-normalised features [n, E], float32 or float64, to a batch. The towers are
    frozen here, in evaluation mode, and moved to `device`; `autocast` returns the context of their passes.
    """

    def __init__(self, towers: Towers, device: str, autocast: Callable[[], AbstractContextManager[None]]) -> None:
        self.towers = towers.requires_grad_(False).eval().to(device)
        self._autocast = autocast

    @property
    def scale(self) -> float:
        """exp(logit_scale) of the teacher."""
        scale, _ = self.towers.scalars()
        return float(scale)

    @torch.no_grad()
    def __call__(self, batch: Batch, size: int | None = None) -> Batch:
        """The batch with the teacher's features of its pixels and ids, or of its own where they differ, in passes of
        `size` samples (None for all).
        """
        pixels = batch.pixels if batch.teacher_pixels is None else batch.teacher_pixels
        ids = batch.ids if batch.teacher_ids is None else batch.teacher_ids
        assert pixels is not None, "a live teacher requires pixels"
        size = size or len(batch)
        chunks = [slice(start, start + size) for start in range(0, len(batch), size)]
        with self._autocast():
            images = [self.towers.encode_image(pixels[chunk]) for chunk in chunks]
            texts = [self.towers.encode_text(ids[chunk]) for chunk in chunks]
        found = {f"{NAME}.image": torch.cat(images), f"{NAME}.text": torch.cat(texts)}
        return replace(batch, features={**batch.features, **found})
