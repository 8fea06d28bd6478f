"""The code beside an exported model: how it is used, and what checks it without clipstream.

encoder.py        the model of a target's own library: features of image files and texts
pixels.py         images as in training, by the functions of `data.decode.images` themselves
preprocess.json   size, resize, mean and standard deviation of the model
example.py        the example of the model card
check.py          what compares all of this with the model
"""

from __future__ import annotations

import ast
import inspect
import json
import shutil
from dataclasses import asdict
from pathlib import Path

from clipstream.data.decode import images
from clipstream.models.towers import Towers

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
    (folder / "pixels.py").write_text(_inlined((USE / "pixels.py").read_text(encoding="utf-8")), encoding="utf-8")


def _inlined(script: str) -> str:
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
