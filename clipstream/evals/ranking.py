"""Owns the place of the right answer among many scores, and its rule for ties; never reads data, never runs a model.

Scores are float64 products of float32 features, computed in tiles: the largest thing in memory is one tile. An answer
whose score equals the right one's shares the places with it, by chance: with `ahead` better answers and `level` equal
ones (the right one among them) a hit within the first k counts as clamp((k - ahead) / level, 0, 1), the expected hit of
a random order. So figures do not depend on the order of the data, a model whose features are all alike scores exactly
chance, and without ties the figures are those of CLIP_benchmark and open_clip.
"""

from __future__ import annotations

import torch

TIE = 1e-12  # far above float64's rounding of a product of unit vectors, far below a float32 difference


def place(
    queries: torch.Tensor, answers: torch.Tensor, right: torch.Tensor, *, rows: int = 1024, columns: int = 4096
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many answers score better than each query's right one, and how many the same.

    Args:
        queries: [n, D], L2-normalised.
        answers: [N, D], L2-normalised.
        right: int64 [n], position in `answers` of each query's right answer.
        rows, columns: size of a tile; a tile takes rows x columns x 8 bytes, a few times over.

    Returns:
        (ahead, level), int64 [n] each. level counts the right answer itself; it is 0 where the right answer's score is
        not a number, which counts as a miss.
    """
    ahead = torch.zeros_like(right)
    level = torch.zeros_like(right)
    for top in range(0, len(queries), rows):
        part = slice(top, top + rows)
        block = queries[part].double()
        own = (block * answers[right[part]].double()).sum(dim=1, keepdim=True)
        for left in range(0, len(answers), columns):
            gap = block @ answers[left : left + columns].double().T - own
            ahead[part] += (gap > TIE).sum(dim=1)
            level[part] += (gap.abs() <= TIE).sum(dim=1)
    return ahead, level


def hits(ahead: torch.Tensor, level: torch.Tensor, k: int) -> torch.Tensor:
    """Expected hits within the first k places, float64 [n] in 0 to 1, of what `place` found."""
    share = ((k - ahead).double() / level.clamp(min=1)).clamp(0, 1)
    return torch.where(level > 0, share, 0.0)
