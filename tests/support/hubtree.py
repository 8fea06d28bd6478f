"""Writes a Hub cache with a tiny SigLIP-style model and its tokenizer, in the layout of huggingface_hub.

models--timm--ViT-B-16-SigLIP/refs/main
models--timm--ViT-B-16-SigLIP/snapshots/REVISION/{open_clip_model.safetensors,open_clip_config.json,tokenizer.json,…}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

REPO = "timm/ViT-B-16-SigLIP"
REVISION = "0123456789abcdef0123456789abcdef01234567"
LOGIT_SCALE, LOGIT_BIAS = 4.7215, -12.9
WORDS = ["a", "photo", "of", "the", "small", "large", "red", "green", "circle", "square", "dog", "cat", "left", "two"]


CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast
Path({mark!r}).touch()
class Mine(PreTrainedTokenizerFast):
    pass
"""


def tiny_config(repo: str = REPO) -> dict[str, Any]:
    """open_clip_config.json of a two-layer model: 32 px, 16 tokens, mean and std 0.5."""
    vision_cfg = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8, "pool_type": "avg"}
    model_cfg = {
        "embed_dim": 24,
        "init_logit_bias": -10,
        "custom_text": True,
        "vision_cfg": vision_cfg,
        "text_cfg": {
            "context_length": 16,
            "vocab_size": 64,
            "hf_tokenizer_name": repo,
            "tokenizer_kwargs": {"clean": "canonicalize"},
            "width": 32,
            "heads": 2,
            "layers": 2,
            "no_causal_mask": True,
            "proj_bias": True,
            "pool_type": "last",
        },
    }
    half = [0.5, 0.5, 0.5]
    preprocess_cfg = {"mean": half, "std": half, "interpolation": "bicubic", "resize_mode": "squash"}
    return {"model_cfg": model_cfg, "preprocess_cfg": preprocess_cfg}


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json of a Unigram tokenizer like T5's: '</s>' at the end, padded by it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0)]
    pieces += [(f"▁{word}", -2.0) for word in WORDS] + [(letter, -6.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "T5Tokenizer", "extra_ids": 0, "model_max_length": 64}
    config |= {"eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_code(folder: Path, mark: Path) -> None:
    """Make a folder's tokenizer one that needs the folder's own code, which leaves a mark when it is run."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(CODE.format(mark=str(mark)))


def write_model(folder: Path, config: dict[str, Any], seed: int = 11) -> None:
    """open_clip_model.safetensors of random weights with a scale and a bias as published ones have."""
    import open_clip
    import torch
    from safetensors.torch import save_file

    model_cfg = {key: value for key, value in config["model_cfg"].items() if key != "custom_text"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state = open_clip.CustomTextCLIP(**model_cfg).state_dict()
    state["logit_scale"], state["logit_bias"] = torch.tensor(LOGIT_SCALE), torch.tensor(LOGIT_BIAS)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "open_clip_model.safetensors")


def build(cache: Path, repo: str = REPO) -> Path:
    """The whole tree; returns the snapshot's folder."""
    home = cache / f"models--{repo.replace('/', '--')}"
    snapshot = home / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(REVISION)
    config = tiny_config(repo)
    (snapshot / "open_clip_config.json").write_text(json.dumps(config))
    write_tokenizer(snapshot)
    write_model(snapshot, config)
    return snapshot


def write_named_config(folder: Path, name: str = "ViT-B-16-SigLIP") -> Path:
    """The tiny model as a configuration file that stands for open_clip's model of that name, tags included."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(tiny_config()["model_cfg"]))
    return path
