"""clipstream trains contrastive image-text models (CLIP, SigLIP) over WebDataset shards."""

import sys

from clipstream.utils.early_signals import guard

__version__ = "0.1.0"

if sys.platform == "win32":
    raise ImportError("clipstream runs on Linux and macOS: it forks processes and locks files. On Windows, use WSL")

guard()
