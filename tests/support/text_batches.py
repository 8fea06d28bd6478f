"""Images with texts of given lengths."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.support.model_files import TEXT

TOKENS, LENGTHS = 20, (2, 9, 3, 20, 8, 2, 17, 5, 12, 4)
TEXT_CFG = {**TEXT, "context_length": TOKENS, "vocab_size": 64}


def make_texts(lengths: Sequence[int] = LENGTHS) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels, and ids of texts of these lengths with their end-of-text token."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.zeros(len(lengths), TOKENS, dtype=torch.int32)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = torch.randint(1, 60, (length,), generator=draw)
        row[length - 1] = 63
    return torch.randint(0, 256, (len(ids), 3, 32, 32), dtype=torch.uint8, generator=draw), ids
