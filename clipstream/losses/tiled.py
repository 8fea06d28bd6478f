"""Contrastive losses over tiles of the logits: value and gradients, without the whole matrix.

Of the B x B logits s_ij = scale <x_i, y_j> + bias, a rank computes the rows of its own n images, with the texts of all
ranks (see `ring`). Only one tile exists at a time, in reused buffers. Memory beside features and their gradients: 2 to
4 tiles, a few numbers for each of the B samples and, on several ranks, the texts and sums of all of them (2 B D) or
those in transit (up to 5 n D). There is no autograd: gradients are computed with the value. Sums have the dtype of the
features, float32 or float64. tests/support/losses.py has the same losses in a few lines.

The targets t_ij say which pairs match: t_ij = [i = j], or 1 for all pairs with the same label. k_i is the number of
present samples that match i.

**Softmax** (CLIP, arXiv:2103.00020). With r_i = w_i / 2W over the samples that are present:

    L = sum_i r_i (R_i + C_i) - sum_ij t_ij (r_i / k_i + r_j / k_j) s_ij
    R_i = logsumexp_j s_ij,    C_j = logsumexp_i s_ij
    dL/ds_ij = r_i exp(s_ij - R_i) + r_j exp(s_ij - C_j) - t_ij (r_i / k_i + r_j / k_j)

Two passes: the first computes R and C, the second recomputes each tile and multiplies dL/ds with rows and columns, as
Inf-CL does (arXiv:2410.17243). 4 n B D multiply-adds; dense autograd takes 6 if it computes the logits twice.

**Sigmoid** (SigLIP, arXiv:2303.15343). With m_ij = (w_i + w_j) / 2W and z_ij = 1 - 2 t_ij:

    L = sum_ij m_ij softplus(z_ij s_ij),    dL/ds_ij = m_ij z_ij sigmoid(z_ij s_ij)

One pass, 3 n B D multiply-adds. No term is negative, and none is the difference of large numbers: a loss of 1e-7 is as
exact as one of 1.

**Several texts of a sample** (`Pairs.roles`): of its M texts, those of role 1 are captions, those of role -1 hard
negatives, and those of role 0 are absent. The columns c are then all texts. With p captions of a sample, q_c = w / 2Wp
for each of them and 0 for its negatives, k_i captions that match image i and k_c images that match caption c:

    L = sum_i r_i R_i + sum_c q_c C_c - sum_ic t_ic (r_i / k_i + q_c / k_c) s_ic                    softmax
    L = sum_ic (r_i u_c + q_c) softplus(z_ic s_ic),    u_c = 1 / p, of a negative 1                 sigmoid

so that negatives are in the softmax of the rows only.

**Terms within images or within texts** (`Pairs.within`) are the same sums with y = x, where no sample is paired with
itself, t_ij = [equal labels, i != j], and samples that match none have r_i = 0 and w_i = 0 as anchors. As s is
symmetric, R = C, and the softmax is SupCon's L_out (arXiv:2004.11362, equation 2), times the share of the anchors:

    L = 1 / W sum_i w_i (R_i - 1 / k_i sum_j t_ij s_ij),    dL/dx_i = 2 scale sum_j dL/ds_ij x_j

A rank thus has the whole gradient of its own rows, and no sums travel. 3 n B D multiply-adds, sigmoid 2 n B D.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from clipstream.distributed.world import World, complete
from clipstream.losses.ring import Ring, is_gathered
from clipstream.losses.settings import Duplicates

ROWS, COLUMNS = 1024, 1024  # of a tile: 4 MiB in float32, for the caches of a CPU
GPU_ROWS, GPU_COLUMNS = 4096, 8192  # 128 MiB: fewer kernels, which take longer than their launch
BUFFERS = 2  # of a loss: the tile of logits, and one for `logsumexp` and the gradient
TEMPORARIES = 2  # tiles that one operation may allocate beside the buffers
EXACT = 40.0  # above it softplus(s) is s, to the last bit of a float64

Each = tuple[torch.Tensor, torch.Tensor]  # numbers of the samples, [B], and of the texts, [B M]


@dataclass(frozen=True)
class Pairs:
    """The inputs of a rank's logits, all of one dtype, float32 or float64."""

    images: torch.Tensor  # x, [n, D], of this rank
    texts: torch.Tensor  # y as `Ring.around` takes them: of this rank, [n, M D], or of all
    scale: torch.Tensor  # scalar
    bias: torch.Tensor | None  # scalar; None for none, and for a softmax, which it does not change
    weights: torch.Tensor  # w of all ranks' samples, [B]
    ring: Ring  # the ranks
    labels: torch.Tensor | None = None  # int64 [B], equal for duplicates; None if duplicates are negatives
    duplicates: Duplicates = "negatives"  # how a pair of two samples with the same label counts
    roles: torch.Tensor | None = None  # of the M texts of all samples, [B, M]; None for one caption of each
    within: bool = False  # whether `texts` are `images` of all ranks; labels are then given, and duplicates positives


class TileResult(NamedTuple):
    """A rank's share of the loss, and gradients: complete for images and texts, a part of the sum for scale and bias.

    Without gradients, `images` and `texts` are None.
    """

    share: torch.Tensor
    images: torch.Tensor | None
    texts: torch.Tensor | None
    scale: torch.Tensor
    bias: torch.Tensor


class Tile(NamedTuple):
    """A tile of the logits."""

    s: torch.Tensor  # the logits, [a, b]; far below all others if a sample is absent or the pair masked
    rows: slice  # its rows among this rank's images
    block: slice  # its columns among the texts of the current rank
    columns: slice  # its columns among all texts


def softmax(pairs: Pairs, *, gradients: bool) -> TileResult:
    """This rank's share of the softmax loss, and its gradients if requested. Collective."""
    tiles, ring = Tiles(pairs), pairs.ring
    each = tiles.each()
    sums = LogSums(tiles)
    right = tiles.right(each[0]) if tiles.diagonal_targets else pairs.images.new_zeros(())

    def add(start: int, texts: torch.Tensor) -> None:
        for tile in tiles.iterate(start, texts):
            if not tiles.diagonal_targets:
                right.add_(tiles.targets(each, tile).mul_(tile.s).sum())
            sums.add(tile)

    ring.around(pairs.texts, add)
    sums.reduce()
    own, row_lse, column_lse = ring.own, sums.rows, sums.columns
    halves, columns = tiles.halves[own], tiles.column_halves
    left = halves * (row_lse + column_lse[own]) if pairs.roles is None else tiles.left(row_lse, column_lse)
    found = tiles.begin(left.sum() - right, gradients=gradients)
    if not gradients:
        return found

    def carry(start: int, texts: torch.Tensor) -> torch.Tensor | None:
        of_texts = None if pairs.within else torch.zeros_like(texts)
        for tile in tiles.iterate(start, texts):
            g = torch.sub(tile.s, row_lse[tile.rows, None], out=tiles.view(1, tile.s)).exp_()
            g *= halves[tile.rows, None]
            by_column = tile.s.sub_(column_lse[None, tile.columns]).exp_()
            g.addcmul_(by_column, columns[None, tile.columns])
            tiles.subtract_targets(g, each, tile)
            tiles.add(g, tile, texts, found, of_texts)
        return of_texts

    return tiles.scale_gradients(found, ring.around(pairs.texts, carry))


def sigmoid(pairs: Pairs, *, gradients: bool) -> TileResult:
    """This rank's share of the sigmoid loss, and its gradients if requested. Collective."""
    tiles = Tiles(pairs)
    found = tiles.begin(pairs.images.new_zeros(()), gradients=gradients)

    def carry(start: int, texts: torch.Tensor) -> torch.Tensor | None:
        of_texts = torch.zeros_like(texts) if gradients and not pairs.within else None
        for tile in tiles.iterate(start, texts):
            tiles.negate_targets(tile.s, tile)
            weights = tiles.pair_weights(tile)
            found.share.add_(F.softplus(tile.s, threshold=EXACT).mul_(weights).sum())
            if gradients:
                g = weights.mul_(tile.s.sigmoid_())
                tiles.negate_targets(g, tile)
                found.bias.add_(g.sum())
                tiles.add(g, tile, texts, found, of_texts)
        return of_texts

    return tiles.scale_gradients(found, pairs.ring.around(pairs.texts, carry))


def peak_bytes(loss: Any, n: int, total: int, width: int, world: World) -> int:
    """About the memory that a loss of n of `total` samples takes on a GPU: features, gradients, sums and tiles.

    Args:
        loss: its `gather_gib`, count of `buffers` and terms `within` images or texts, where it has them.
        width: numbers of a feature.
    """
    texts, buffers = 4 * total * width, getattr(loss, "buffers", BUFFERS)
    gathered = world.size > 1 and is_gathered(world, texts, getattr(loss, "gather_gib", None))
    tiles = (buffers + TEMPORARIES) * 4 * min(n, GPU_ROWS) * min(total, GPU_COLUMNS)
    rows = 6 + len(getattr(loss, "within", ()))
    return 2 * texts * gathered + rows * 4 * n * width + tiles


class Tiles:
    """Iterates over a rank's tiles, which share buffers.

    Args:
        pairs: the inputs of the logits.
        buffers: number of buffers of the size of a tile: BUFFERS, and the caller's.

    Attributes:
        pairs: the inputs of the logits.
        halves: w_i / 2W of all samples, [B].
        column_halves: the same, q, of all texts, [B M].
        diagonal_targets: whether a sample matches only itself, and has one text.
    """

    def __init__(self, pairs: Pairs, buffers: int = BUFFERS) -> None:
        self.pairs = pairs
        total = pairs.weights.sum().clamp_min(torch.finfo(pairs.weights.dtype).tiny)  # 0 / 0 would be nan
        self.halves: torch.Tensor = pairs.weights / (2 * total)
        self.diagonal_targets: bool = pairs.duplicates != "positives" and pairs.roles is None
        rows, columns = (GPU_ROWS, GPU_COLUMNS) if pairs.images.is_cuda else (ROWS, COLUMNS)
        self._texts = 1 if pairs.roles is None else pairs.roles.shape[1]
        count = len(pairs.weights) * self._texts
        self._rows, self._columns = max(1, min(rows, len(pairs.images))), min(columns, count)
        self._buffers = [pairs.images.new_empty(self._rows * self._columns) for _ in range(buffers)]
        # Far below all logits; with -inf, rows without a present sample would give nan.
        self._low = torch.finfo(pairs.images.dtype).min / 8
        gone = pairs.weights == 0
        self._absent = None if _none_on_cpu(gone) else gone.to(pairs.images.dtype) * self._low
        self._labels = pairs.labels
        if pairs.labels is not None:  # an absent sample has no duplicates
            self._labels = torch.where(gone, -1 - torch.arange(len(gone), device=gone.device), pairs.labels)
        if pairs.within:
            self.halves = self.halves * (_counts(self._labels, self._labels) > 1)
        self.column_halves, self._column_labels, absent = self.halves, self._labels, self._absent
        if pairs.roles is not None:
            absent = self._take_roles(pairs.roles, gone)
        self._added = pairs.bias  # to the logits; by columns, as one kernel adds it with the product
        if absent is not None:
            self._added = absent if pairs.bias is None else absent + pairs.bias

    def _take_roles(self, roles: torch.Tensor, gone: torch.Tensor) -> torch.Tensor:
        """Set weights and labels of the texts of several of a sample; returns what is added to absent ones' logits."""
        captions, numbers = (roles > 0) & ~gone[:, None], torch.arange(roles.numel(), device=roles.device)
        own = 1 / captions.sum(dim=1, keepdim=True).clamp_min(1).to(self.halves.dtype)
        self.column_halves = (captions * self.halves[:, None] * own).flatten()
        self._shares = torch.where(captions, own, 1.0).flatten()
        if self._labels is None:
            self._labels = numbers[: len(roles)]
        others = -1 - len(roles) - numbers.view(roles.shape)  # match nothing
        self._column_labels = torch.where(captions, self._labels[:, None], others).flatten()
        out = (roles == 0) | gone[:, None]
        return out.flatten().to(self.halves.dtype) * self._low

    def iterate(self, start: int, texts: torch.Tensor) -> Iterator[Tile]:
        """The tiles of this rank's images with the texts [m, M D] of samples from `start` on, each until the next."""
        pairs, texts, start = self.pairs, self.by_text(texts), start * self._texts
        for row in range(0, len(pairs.images), self._rows):
            images = pairs.images[row : row + self._rows] * pairs.scale
            for column in range(0, len(texts), self._columns):
                some = texts[column : column + self._columns]
                s = self._buffers[0][: len(images) * len(some)].view(len(images), len(some))
                tile = Tile(
                    s,
                    rows=slice(row, row + len(images)),
                    block=slice(column, column + len(some)),
                    columns=slice(start + column, start + column + len(some)),
                )
                if self._added is None:
                    torch.mm(images, some.T, out=s)
                elif self._added.ndim == 0:
                    torch.addmm(self._added, images, some.T, out=s)
                else:
                    torch.addmm(self._added[tile.columns], images, some.T, out=s)
                    if self._absent is not None:
                        s += self._absent[self._own(tile), None]
                if pairs.duplicates == "mask":
                    same = self._same(tile)
                    self._at_diagonal(same, tile).fill_(False)
                    s.masked_fill_(same, self._low)
                if pairs.within:
                    self._at_diagonal(s, tile).fill_(self._low)
                yield tile

    def by_text(self, texts: torch.Tensor) -> torch.Tensor:
        """Rows of samples [m, M D] as rows of texts [m M, D], in the same memory."""
        return texts if self._texts == 1 else texts.view(-1, self.pairs.images.shape[1])

    def left(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """r_i R_i of this rank's images and q_c C_c of their texts, [n + n M]."""
        own = self.pairs.ring.own
        texts = slice(own.start * self._texts, own.stop * self._texts)
        return torch.cat([self.halves[own] * rows, self.column_halves[texts] * columns[texts]])

    def _own(self, tile: Tile) -> slice:
        """The tile's rows among all samples."""
        start = self.pairs.ring.start
        return slice(start + tile.rows.start, start + tile.rows.stop)

    def _same(self, tile: Tile) -> torch.Tensor:
        assert self._labels is not None and self._column_labels is not None
        same = self._labels[self._own(tile), None] == self._column_labels[None, tile.columns]
        if self.pairs.within:
            self._at_diagonal(same, tile).fill_(False)
        return same

    def _at_diagonal(self, values: torch.Tensor, tile: Tile) -> torch.Tensor:
        """A view of a tile's entries i = j; may be empty."""
        return torch.diagonal(values, self._own(tile).start - tile.columns.start)

    def view(self, number: int, like: torch.Tensor) -> torch.Tensor:
        """Buffer `number` in the shape of a tile."""
        return self._buffers[number][: like.numel()].view(like.shape)

    def logsumexp(self, s: torch.Tensor, dim: int) -> torch.Tensor:
        """torch.logsumexp without allocation of a tile."""
        most = s.amax(dim=dim, keepdim=True)
        return torch.sub(s, most, out=self.view(1, s)).exp_().sum(dim=dim).log_().add_(most.squeeze(dim))

    def pair_weights(self, tile: Tile) -> torch.Tensor:
        """The weights of a tile's pairs in the sigmoid loss, in the second buffer."""
        rows, columns, out = (
            self.halves[self._own(tile), None],
            self.column_halves[None, tile.columns],
            self.view(1, tile.s),
        )
        if self.pairs.roles is None:
            return torch.add(rows, columns, out=out)
        return torch.mul(rows, self._shares[None, tile.columns], out=out).add_(columns)

    def targets(self, values: Each, tile: Tile) -> torch.Tensor:
        """t_ij (v_i + v_j) of a tile, in the second buffer, with targets from labels."""
        rows, columns = values[0][self._own(tile), None], values[1][None, tile.columns]
        return torch.add(rows, columns, out=self.view(1, tile.s)).mul_(self._same(tile))

    def subtract_targets(self, g: torch.Tensor, values: Each, tile: Tile) -> None:
        """g_ij -= t_ij (v_i + v_j)."""
        if self.diagonal_targets:
            own = self._own(tile)
            first, last = max(own.start, tile.columns.start), min(own.stop, tile.columns.stop)
            self._at_diagonal(g, tile).sub_(2 * values[0][first : max(first, last)])
        else:
            both = values[0][self._own(tile), None] + values[1][None, tile.columns]
            g.sub_(both.mul_(self._same(tile)))

    def negate_targets(self, values: torch.Tensor, tile: Tile) -> None:
        """v_ij *= 1 - 2 t_ij of a tile's v."""
        if self.diagonal_targets:
            self._at_diagonal(values, tile).neg_()
        else:
            torch.where(self._same(tile), -values, values, out=values)

    def each(self) -> Each:
        """r_i / k_i of all samples, [B], and q_c / k_c of all texts, [B M]."""
        if self.diagonal_targets:
            return self.halves, self.halves
        if self.pairs.roles is not None:
            counts = _counts(self._labels, self._column_labels), _counts(self._column_labels, self._labels)
            return self.halves / counts[0].clamp_min(1), self.column_halves / counts[1].clamp_min(1)
        count = _counts(self._labels, self._labels).to(self.halves.dtype)
        both = self.halves / ((count - 1).clamp_min(1) if self.pairs.within else count)
        return both, both

    def right(self, values: torch.Tensor) -> torch.Tensor:
        """sum_i 2 v_i s_ii over this rank's samples, of v [B]."""
        pairs, total = self.pairs, self.pairs.images.new_zeros(())
        texts = pairs.texts[pairs.ring.own] if pairs.ring.gathers else pairs.texts
        for some, own in self._strips():
            total += (2 * values[own] * (pairs.images[some] * texts[some]).sum(dim=1) * pairs.scale).sum()
        return total

    def begin(self, share: torch.Tensor, *, gradients: bool) -> TileResult:
        """The share, and zeroed gradients."""
        images, zero = self.pairs.images, torch.zeros_like(share)
        return TileResult(share, torch.zeros_like(images) if gradients else None, None, zero, zero.clone())

    def add(
        self, g: torch.Tensor, tile: Tile, texts: torch.Tensor, found: TileResult, of_texts: torch.Tensor | None
    ) -> None:
        """Add the gradients of a tile's images and texts, without the factor scale, from g = dL/ds."""
        assert found.images is not None
        found.images[tile.rows].addmm_(g, self.by_text(texts)[tile.block])
        if of_texts is not None:
            self.by_text(of_texts)[tile.block].addmm_(g.T, self.pairs.images[tile.rows])

    def scale_gradients(self, found: TileResult, of_texts: torch.Tensor | None) -> TileResult:
        """Multiply the gradients by the scale, and compute its own; without gradients, unchanged."""
        if found.images is None:
            return found
        pairs, of_scale = self.pairs, found.scale
        for some, _ in self._strips():
            of_scale.add_((pairs.images[some] * found.images[some]).sum())
        if of_texts is None:  # within: each pair is there twice
            return found._replace(images=found.images.mul_(2 * pairs.scale))
        return found._replace(images=found.images.mul_(pairs.scale), texts=of_texts.mul_(pairs.scale))

    def _strips(self) -> Iterator[tuple[slice, slice]]:
        """This rank's samples in slices of a tile's rows: among its own, and among all."""
        for row in range(0, len(self.pairs.images), self._rows):
            some = slice(row, min(row + self._rows, len(self.pairs.images)))
            yield some, slice(self.pairs.ring.start + some.start, self.pairs.ring.start + some.stop)


class LogSums:
    """The logsumexp of the rows and columns of a matrix of logits, from its tiles.

    Attributes:
        rows: R of this rank's rows, [n].
        columns: C of all columns, [B]; over this rank's rows until `reduce`.
    """

    def __init__(self, tiles: Tiles) -> None:
        self._tiles = tiles
        self.rows: torch.Tensor = tiles.pairs.images.new_full((len(tiles.pairs.images),), -torch.inf)
        self.columns: torch.Tensor = tiles.pairs.images.new_full((len(tiles.column_halves),), -torch.inf)

    def add(self, tile: Tile) -> None:
        """Add the logits of a tile."""
        rows, columns = self.rows[tile.rows], self.columns[tile.columns]
        torch.logaddexp(rows, self._tiles.logsumexp(tile.s, dim=1), out=rows)
        torch.logaddexp(columns, self._tiles.logsumexp(tile.s, dim=0), out=columns)

    def reduce(self) -> None:
        """Combine the columns of all ranks; a rank without rows has -inf in all of them. Collective."""
        world = self._tiles.pairs.ring.world
        if world.size > 1:
            most = self.columns.clone()
            complete(dist.all_reduce(most, dist.ReduceOp.MAX, async_op=True), most)
            self.columns = world.all_reduce_sum(torch.exp(self.columns - most)).log_().add_(most)


def _counts(labels: torch.Tensor | None, among: torch.Tensor | None) -> torch.Tensor:
    """How many of the labels `among` [m] equal each label, int64 [n]."""
    assert labels is not None and among is not None
    ordered = among.sort().values
    first, after = (torch.searchsorted(ordered, labels, right=right) for right in (False, True))
    return after - first


def _none_on_cpu(flags: torch.Tensor) -> bool:
    """Whether no flag is set, as far as that is known without waiting for a device or breaking a compiled graph."""
    return not torch.compiler.is_compiling() and flags.device.type == "cpu" and not bool(flags.any())
