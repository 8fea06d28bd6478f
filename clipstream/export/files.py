"""The files of an exported model for each target: weights, configuration, image processor and tokenizer.

`Towers` and a folder enter. A tokenizer leaves as a `tokenizer.json` whose normalizer does what open_clip's cleaning
does, and an image processor as the configuration of transformers' class that resizes and crops as open_clip does.
Beside the model stands the code by which it is used, and checked without clipstream:

encoder.py        the model of a target's own library: features of image files and texts
pixels.py         images as in training, by the functions of `data.decode.images` themselves
preprocess.json   size, resize, mean and standard deviation of the model
example.py        the example of the model card
check.py          what compares all of this with the model
"""

from __future__ import annotations

import ast
import html
import inspect
import json
import shutil
import string
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers
from ftfy import chardata
from open_clip.tokenizer import SimpleTokenizer, get_clean_fn
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from clipstream.data.decode import images
from clipstream.export.counterparts import (
    PAD,
    image_tower,
    logit_note,
    none,
    sees_padding,
    text_tower,
    whole_model,
)
from clipstream.models.towers import Towers
from clipstream.models.transformers_names import PREPROCESSOR, PROCESSOR, RESAMPLE

ENTITIES = ("amp", "lt", "gt", "quot", "apos", "nbsp", "#39", "#34", "#x27", "#8217", "#8211", "rsquo", "lsquo",
            "ldquo", "rdquo", "ndash", "mdash", "hellip", "eacute", "copy", "reg", "trade", "deg", "bull")  # fmt: skip
PROCESSOR_FILES = (PREPROCESSOR, PROCESSOR)


def unescape(text: str) -> str:
    """The text without the `ENTITIES` of HTML, as an exported tokenizer reads it."""
    for name in ENTITIES:
        text = text.replace(f"&{name};", html.unescape(f"&{name};"))
    return text


def cleaning(kind: str) -> Iterator[Any]:
    """Normalizers that do what open_clip's cleaning of a text does: 'lower', 'whitespace' or 'canonicalize'.

    They lack ftfy's repair of texts in a wrong encoding, and rare entities of HTML.
    """
    yield normalizers.Replace(Regex(chardata.SINGLE_QUOTE_RE.pattern), "'")
    yield normalizers.Replace(Regex(chardata.DOUBLE_QUOTE_RE.pattern), '"')
    for table in (chardata.LIGATURES, chardata.WIDTH_MAP):
        yield from (normalizers.Replace(chr(code), text) for code, text in table.items())
    yield from (normalizers.Replace(f"&{name};", html.unescape(f"&{name};")) for name in ENTITIES)
    yield normalizers.NFC()
    if kind == "canonicalize":
        yield normalizers.Replace("_", " ")
        yield normalizers.Replace(Regex("[" + "".join(f"\\{char}" for char in string.punctuation) + "]"), "")
    yield normalizers.Replace(Regex(r"\s+"), " ")
    yield normalizers.Strip()
    if kind != "whitespace":
        yield normalizers.Lowercase()


def fast_tokenizer(towers: Towers) -> tuple[Backend, dict[str, Any]]:
    """The model's tokenizer for `tokenizers`, which cuts and pads as in training, and what transformers is told of it.

    Raises SettingsError: a tokenizer that `tokenizers` cannot run.
    """
    own = towers.open_clip_tokenizer()
    kind = next((name for name in ("lower", "whitespace", "canonicalize") if get_clean_fn(name) is own.clean_fn), None)
    if kind is None:
        raise none("this tokenizer's cleaning of texts", "it is a function of its own")
    length = towers.context_length
    told: dict[str, Any] = {"model_max_length": length, "model_input_names": ["input_ids"]}
    if type(own) is SimpleTokenizer:
        if own.reduction_fn is not None:
            raise none("a tokenizer with reduction_mask", "tokenizers keep the first words")
        backend = _bpe(own, list(cleaning(kind)))
        told |= {"bos_token": "<start_of_text>", "eos_token": "<end_of_text>", "unk_token": "<end_of_text>"}
        told |= {"pad_token": PAD if sees_padding(towers) else "<end_of_text>"}
        backend.enable_padding(length=length, pad_id=0, pad_token="!")
    else:
        inner = own.tokenizer
        if not getattr(inner, "is_fast", False) or own.strip_sep_token or own.tokenizer_mode:
            raise none(f"the tokenizer {type(inner).__name__}", "it has no tokenizer.json, or a mode of its own")
        backend = Backend.from_str(inner.backend_tokenizer.to_str())
        before = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([*cleaning(kind), *before])
        told |= {name: token for name, token in inner.special_tokens_map.items() if isinstance(token, str)}
        told |= {"padding_side": inner.padding_side}
        if hasattr(towers.clip, "text") and getattr(towers.clip.text, "config", None) is not None:
            told["model_input_names"] = ["input_ids", "attention_mask"]
        pad = {"pad_id": inner.pad_token_id, "pad_token": inner.pad_token, "direction": inner.padding_side}
        backend.enable_padding(length=length, **pad)
    backend.enable_truncation(length)
    return backend, told


def _bpe(own: SimpleTokenizer, clean: list[Any]) -> Backend:
    """CLIP's byte pair encoding, as open_clip's SimpleTokenizer has it."""
    merges = sorted(own.bpe_ranks, key=own.bpe_ranks.__getitem__)
    backend = Backend(models.BPE(vocab=own.encoder, merges=merges, end_of_word_suffix="</w>"))
    backend.normalizer = normalizers.Sequence(clean)
    special = [token for token in own.encoder if token.startswith("<") and own.encoder[token] in own.all_special_ids]
    words = "|".join([*(token.replace("|", r"\|") for token in special), "'s|'t|'re|'ve|'m|'ll|'d"])
    pattern = Regex(words + r"|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    names = {ident: token for token, ident in own.encoder.items()}
    start, end = names[own.sot_token_id], names[own.eot_token_id]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", special_tokens=[(start, own.sot_token_id), (end, own.eot_token_id)]
    )
    return backend


def write_tokenizer(towers: Towers, folder: Path) -> None:
    """Write the tokenizer as transformers reads it. Raises SettingsError: as `fast_tokenizer`."""
    backend, told = fast_tokenizer(towers)
    backend.no_padding()
    backend.no_truncation()
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **told).save_pretrained(folder)
    _rewrite(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def _rewrite(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values, indent=2) + "\n", encoding="utf-8")


def write_processor(towers: Towers, folder: Path, kind: str) -> None:
    """Write the image processor as transformers reads it; `kind` is the class of a model of both towers, or empty.

    Its CLIPImageProcessor rounds the centre crop down where torchvision's, and so open_clip's, rounds half to even;
    images that are cropped so, or padded, are left to timm's transforms, which transformers wraps. Programs that do not
    know these read CLIPImageProcessor from preprocessor_config.json.
    """
    spec, preprocess = towers.image, towers.config.preprocess_cfg
    (height, width), mode = spec.size, spec.resize_mode
    size = {"height": height, "width": width}
    mean, std = list(preprocess["mean"]), list(preprocess["std"])
    plain: dict[str, Any] = {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": size if mode != "shortest" else {"shortest_edge": height},
        "resample": RESAMPLE[spec.interpolation],
        "do_center_crop": mode == "shortest",
        "crop_size": size,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": mean,
        "image_std": std,
    }
    exact = plain
    if mode != "squash" and not spec.floor_crop:
        crop = {"crop_pct": 1.0, "crop_mode": "center" if mode == "shortest" else "border"}
        cfg = {"input_size": [3, height, width], "interpolation": spec.interpolation, "mean": mean, "std": std, **crop}
        exact = {"image_processor_type": "TimmWrapperImageProcessor", "architecture": None, "pretrained_cfg": cfg}
    named = {"processor_class": f"{kind.removesuffix('Model')}Processor"} if kind else {}
    for name, content in zip(PROCESSOR_FILES, (plain | named, named | {"image_processor": exact}), strict=True):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_transformers(towers: Towers, folder: Path, options: Any) -> str:
    """Write a folder of transformers; returns a note for the model card.

    Raises SettingsError: a part of the model has no counterpart in transformers.
    """
    model = whole_model(towers, image_tower(towers), text_tower(towers))
    model.save_pretrained(folder)
    write_tokenizer(towers, folder)
    write_processor(towers, folder, type(model).__name__)
    return f"`{type(model).__name__}` of transformers. {logit_note(towers, model)}".strip()


def write_open_clip(towers: Towers, folder: Path, options: Any) -> str:
    """Write a folder of open_clip; returns a note for the model card."""
    towers.save_pretrained(folder)
    return "A model of open_clip."


USE = Path(__file__).parent / "use"
EXAMPLE = USE / "example.py"
_IMPORT = f"from {images.__name__} import "


def write_use(towers: Towers, folder: Path, target: str) -> None:
    """Write the code of a target into the folder of its files."""
    spec, cfg = towers.image, towers.config.preprocess_cfg
    told = {**asdict(spec), "mean": list(cfg["mean"]), "std": list(cfg["std"])}
    (folder / "preprocess.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(USE / f"with_{target.replace('-', '_')}.py", folder / "encoder.py")  # without its mode
    for path in (EXAMPLE, USE / "check.py"):
        shutil.copyfile(path, folder / path.name)
    (folder / "pixels.py").write_text(_inline((USE / "pixels.py").read_text(encoding="utf-8")), encoding="utf-8")


def _inline(script: str) -> str:
    """A script with the functions that it imports of `data.decode.images`, and what these use, instead of the import.

    Constants of other modules of ours are written as their values, and Dropped is ValueError.
    """
    lines = inspect.getsource(images).splitlines()
    defined: dict[str, ast.stmt] = {}
    for node in ast.parse("\n".join(lines)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign):
            defined |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Import):
            defined |= {alias.asname or alias.name: ast.Import([alias]) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and "clipstream" not in str(node.module):
            defined |= {alias.name: ast.ImportFrom(node.module, [alias], 0) for alias in node.names}
    head, _, tail = script.partition(_IMPORT)
    names, _, tail = tail.partition("\n")
    found, constants, wanted = dict[str, ast.stmt](), {"Dropped": "ValueError"}, set(names.split(", "))
    while wanted:
        name = wanted.pop()
        if name not in defined:
            if isinstance(value := getattr(images, name, None), int | str | tuple):
                constants[name] = repr(value)
        elif name not in found:
            found[name] = node = defined[name]
            notes = {id(n) for part in ast.walk(node) for note in _annotations(part) for n in ast.walk(note)}
            wanted |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and id(n) not in notes}
    imports = {ast.unparse(node) for node in found.values() if isinstance(node, ast.Import | ast.ImportFrom)}
    parts = [*sorted(line for line in imports if f"\n{line}\n" not in head), ""]
    parts += [f"{name} = {value}" for name, value in constants.items()]
    for node in sorted((node for node in found.values() if hasattr(node, "lineno")), key=lambda node: node.lineno):
        gap = "" if isinstance(node, ast.Assign) else "\n\n"
        parts.append(gap + "\n".join(lines[node.lineno - 1 : node.end_lineno]))
    return head + "\n".join(parts) + "\n" + tail


def _annotations(node: ast.AST) -> list[ast.AST]:
    """What a part of the code says of types, which is not evaluated."""
    notes = (getattr(node, "returns", None), getattr(node, "annotation", None))
    return [note for note in notes if note is not None]
