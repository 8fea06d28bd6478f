"""Evaluating data sets in CLIP_benchmark's layout."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from clipstream.distributed.world import World
from clipstream.evals.context import EvalContext
from clipstream.evals.evaluators.retrieval import Retrieval
from clipstream.evals.evaluators.zero_shot import ZeroShot
from clipstream.evals.settings import EvalSettings
from clipstream.models.build import build_towers
from clipstream.models.settings import ModelSettings
from clipstream.models.towers import Towers
from tests.support.pictures import ByteTokenizer

BUILT: dict[str, Any] = {"zero_shot": ZeroShot, "retrieval": Retrieval}


@lru_cache
def loaded(model: str) -> Towers:
    return build_towers(ModelSettings(name=f"local-dir:{model}"), seed=0)


def evaluate(world: World, model: str, roots: dict[str, str]) -> dict[str, dict[str, float]]:
    """What our evaluators say of each set."""
    towers, found = loaded(model), {}
    for kind, root in roots.items():
        name = "retrieval" if kind == "retrieval" else "zero_shot"
        section = EvalSettings.model_validate({"type": name, "data": {"shards": f"benchmark:{root}"}, "batch_size": 64})
        found[kind] = dict(BUILT[name](section)(EvalContext(towers, ByteTokenizer(), world)))
    return found
