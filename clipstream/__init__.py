"""clipstream trains contrastive image-text models (CLIP, SigLIP) over WebDataset shards.

The public interface is `__all__`. It is imported when it is used: `import clipstream` imports no torch. `train` is a
function and a module: `clipstream.train(…)` and `python -m clipstream.train` both work, whatever was imported before.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from clipstream.utils.torch_state import wait_passively

if TYPE_CHECKING:
    from clipstream import errors as errors
    from clipstream import losses as losses
    from clipstream.api.loader import BatchLoader as BatchLoader
    from clipstream.api.loader import ImageTextBatch as ImageTextBatch
    from clipstream.api.loader import build_loader as build_loader
    from clipstream.api.model import ImageLabel as ImageLabel
    from clipstream.api.model import Model as Model
    from clipstream.api.model import Preprocess as Preprocess
    from clipstream.api.model import TextTokenizer as TextTokenizer
    from clipstream.api.model import ZeroShotClassifier as ZeroShotClassifier
    from clipstream.api.model import load_model as load_model
    from clipstream.api.model import zero_shot as zero_shot
    from clipstream.api.run import Run as Run
    from clipstream.api.run import train as train
    from clipstream.cli.verbs.evaluate import evaluate as evaluate
    from clipstream.config.settings import Settings as Settings
    from clipstream.config.settings import load_settings as load_settings
    from clipstream.curation.check import CheckReport as CheckReport
    from clipstream.curation.check import check as check
    from clipstream.curation.images import Match as Match
    from clipstream.curation.images import SearchResults as SearchResults
    from clipstream.curation.images import search as search

__version__ = "0.1.0"
__all__ = [
    "BatchLoader",
    "CheckReport",
    "ImageLabel",
    "ImageTextBatch",
    "Match",
    "Model",
    "Preprocess",
    "Run",
    "SearchResults",
    "Settings",
    "TextTokenizer",
    "ZeroShotClassifier",
    "__version__",
    "build_loader",
    "check",
    "errors",
    "evaluate",
    "load_model",
    "load_settings",
    "losses",
    "search",
    "train",
    "zero_shot",
]

_PLACES = {  # of what is not a module of its own name
    "CheckReport": "clipstream.curation.check",
    "check": "clipstream.curation.check",
    "evaluate": "clipstream.cli.verbs.evaluate",
    "Run": "clipstream.api.run",
    **dict.fromkeys(("Match", "SearchResults", "search"), "clipstream.curation.images"),
    "Settings": "clipstream.config.settings",
    "load_settings": "clipstream.config.settings",
    **dict.fromkeys(("BatchLoader", "ImageTextBatch", "build_loader"), "clipstream.api.loader"),
    **dict.fromkeys(
        ("ImageLabel", "Model", "Preprocess", "TextTokenizer", "ZeroShotClassifier", "load_model", "zero_shot"),
        "clipstream.api.model",
    ),
}

if sys.platform == "win32":
    raise ImportError("clipstream runs on Linux and macOS: it forks processes and locks files. On Windows, use WSL")

wait_passively()


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        found = getattr(importlib.import_module(_PLACES[name]), name)
    elif name in __all__:
        found = importlib.import_module(f"clipstream.{name}")
    else:
        raise AttributeError(f"module 'clipstream' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
