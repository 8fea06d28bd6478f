"""Numerics that devices have or lack, and torch's settings of them in a program that uses them too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import clipstream
from clipstream.cli.verbs.train import main
from clipstream.curation.stores import TensorRows, find_nearest_preferred
from clipstream.errors import SettingsError
from clipstream.models.precision import check_device, prepare_towers
from clipstream.utils.torch_state import restore_matmul_precision
from tests.support.ranks import end_ranks
from tests.support.runs import flags

MATMUL = "torch.backends.cuda.matmul"
PROGRAMS = [
    "",
    "torch.backends.fp32_precision = 'tf32'",
    f"{MATMUL}.fp32_precision = 'tf32'",
    f"{MATMUL}.fp32_precision = torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    f"{MATMUL}.allow_tf32 = True",
    "torch.set_float32_matmul_precision('medium')",
]


def seen() -> list[Any]:
    """What a program reads of both interfaces."""
    backends = torch.backends
    newer = [backends, backends.cuda.matmul, backends.cudnn, backends.cudnn.conv, backends.mkldnn.matmul]
    found = [one.fp32_precision for one in newer]
    older: list[Callable[[], Any]] = [lambda: backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision]
    for read in older:
        try:
            found.append(read())
        except RuntimeError:
            found.append("raises")
    return found


def use_tf32(enabled: bool) -> None:
    model: Any = SimpleNamespace(own_precisions={})
    prepare_towers(nn.Linear(1, 1), "fp32", model, "cuda:0", tf32=enabled, keep=False)
    assert (torch.backends.cuda.matmul.fp32_precision == "tf32") is enabled


def restore(_: object, program: str) -> int:
    """In a process of its own: what a program has set is as before, after each use of this package."""
    exec(program)
    before = seen()
    for enabled in (True, False):
        with restore_matmul_precision():
            use_tf32(enabled)  # which torch.compile reads by the older interface
            assert program or seen()[-2:] == ([True, "high"] if enabled else [False, "highest"])
        assert seen() == before, enabled
    find_nearest_preferred(TensorRows(torch.eye(2)), np.arange(2))
    assert seen() == before
    exec(program.replace("'tf32'", "'ieee'"))  # also what is set for all backends applies as before
    assert "'tf32'" not in program or torch.backends.cuda.matmul.fp32_precision == "ieee"
    return 0


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_a_program_sets_of_tf32_is_restored(program: str) -> None:
    (end,) = end_ranks(1, restore, program)
    assert end.code == 0, end.stderr


def train(_: object, folder: str) -> int:
    """A program that trains on the CPU by each of the two functions, and takes the model."""
    place = Path(folder)
    for precision in ("tf32", "ieee"):
        torch.backends.fp32_precision = torch.backends.cudnn.conv.fp32_precision = precision
        torch.backends.cuda.matmul.fp32_precision = precision
        before = seen()
        assert main(flags(place, f"main-{precision}", steps=1)) == 0
        assert seen() == before
        run = clipstream.train(place / "runs" / f"main-{precision}" / "config.yaml", name=precision)
        assert seen() == before
        clipstream.load_model(run)
        assert seen() == before
    return 0


def test_a_program_that_uses_the_newer_interface_trains(place: Path) -> None:
    (end,) = end_ranks(1, train, str(place))
    assert end.code == 0, end.stderr


def test_tf32_is_refused_where_no_gpu_computes_it() -> None:
    with pytest.raises(SettingsError, match=r"train\.tf32: the CPU does not support TF32"):
        check_device("cpu", "fp32", tf32=True)
