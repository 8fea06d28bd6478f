"""Distance between the similarities of a student and of a teacher over the global batch, over tiles of both.

With the student's logits s_ij = a <x_i, y_j>, the teacher's t_ij, the softmax Q of the rows of s and P of the rows of
t, Q' and P' of their columns, and r_i = w_i / 2W over the samples that are present:

    L = sum_ij r_i P_ij (log P_ij - log Q_ij) + r_j P'_ij (log P'_ij - log Q'_ij)
    dL/ds_ij = r_i (Q_ij - P_ij) + r_j (Q'_ij - P'_ij)

That is the mean over rows and columns of the Kullback-Leibler divergence. The cross entropy leaves out log P and
log P', the teacher's negative entropy: another value with the same gradient.

As for the softmax of `tiled`, a first pass computes the logsumexp of the rows and columns of both matrices, and a
second one recomputes each tile: value and gradient. The teacher's texts go with the student's to all ranks. With
features of D numbers of the student and E of the teacher: 4 n B D + 2 n B E multiply-adds. Memory beside features and
their gradients: 6 tiles and, on several ranks, the texts of both and the sums, of all ranks or in transit (see `ring`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from clipstream.losses.tiled import Found, LogSums, Pairs, Tile, Tiles

P, Q = 1, 1  # the buffers of log P, of the teacher's tiles, and log Q, of the student's
G, DIFFERENCE = 2, 3  # buffers of the student's tiles: dL/ds, and the logarithm of the ratio


def affinity(student: Pairs, teacher: Pairs, *, divergence: bool, gradients: bool) -> Found:
    """This rank's share of the loss, and its gradients for the student if requested. Collective.

    Args:
        student: without bias, which no softmax depends on; its weights and ring are used for both.
        teacher: rows of the same samples; may have another width.
        divergence: Kullback-Leibler divergence; else cross entropy.
    """
    tiles, others, ring = Tiles(student, buffers=4), Tiles(teacher), student.ring
    sums, other_sums = LogSums(tiles), LogSums(others)
    width = student.texts.shape[1]
    texts = torch.cat([student.texts, teacher.texts], dim=1)

    def iterate(start: int, block: torch.Tensor) -> Iterator[tuple[Tile, Tile]]:
        """The same tile of both matrices."""
        return zip(tiles.iterate(start, block[:, :width]), others.iterate(start, block[:, width:]), strict=True)

    def add(start: int, block: torch.Tensor) -> None:
        for tile, other in iterate(start, block):
            sums.add(tile)
            other_sums.add(other)

    ring.around(texts, add)
    sums.reduce()
    other_sums.reduce()
    found = tiles.begin(student.images.new_zeros(()), gradients=gradients)
    halves = tiles.halves

    def carry(start: int, block: torch.Tensor) -> torch.Tensor | None:
        of_texts = torch.zeros_like(block[:, :width]) if gradients else None
        for tile, other in iterate(start, block):
            rows, columns = tile.rows, tile.columns
            by_rows = halves[ring.own][rows, None], sums.rows[rows, None], other_sums.rows[rows, None]
            by_columns = halves[None, columns], sums.columns[None, columns], other_sums.columns[None, columns]
            g = tiles.view(G, tile.s).zero_()
            for half, lse, other_lse in (by_rows, by_columns):
                q = torch.sub(tile.s, lse, out=tiles.view(Q, tile.s))
                p = torch.sub(other.s, other_lse, out=others.view(P, tile.s))
                ratio = torch.sub(p if divergence else torch.zeros_like(lse), q, out=tiles.view(DIFFERENCE, tile.s))
                p.exp_()
                found.share.add_(ratio.mul_(p).mul_(half).sum())
                if of_texts is not None:
                    g.addcmul_(q.exp_().sub_(p), half)
            if of_texts is not None:
                tiles.add(g, tile, block[:, :width], found, of_texts)
        return of_texts

    return tiles.scaled(found, ring.around(texts, carry))
