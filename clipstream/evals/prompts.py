"""Owns the words of zero-shot classification: class names and prompt templates, from settings, files or open_clip.

Imports no torch but for the names and templates that open_clip holds. It encodes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from clipstream.data.benchmark import Benchmark, of_source
from clipstream.errors import SettingsError
from clipstream.evals.settings import LabelledSettings, ZeroShotSettings

Template = Callable[[str], str]
OF_OPEN_CLIP = ("imagenet", "openai", "simple")


def benchmark_of(settings: LabelledSettings) -> Benchmark | None:
    """The data set in CLIP_benchmark's layout that an evaluator tests on, if it does.

    Raises:
        SettingsError: its address is wrong.
    """
    return None if settings.data is None else of_source(settings.data.shards)


def class_spec(settings: LabelledSettings) -> str | list[str] | None:
    """The setting for `class_names`: the evaluator's own, or else its benchmark's names; None where neither is there.

    Raises:
        SettingsError: the names of the benchmark cannot be read.
    """
    if settings.classes is not None:
        return settings.classes
    benchmark = benchmark_of(settings)
    return None if benchmark is None else benchmark.classes


def template_spec(settings: ZeroShotSettings) -> str | list[str]:
    """The setting for `prompt_templates`: the evaluator's own, or else its benchmark's, or else openai. Raises so."""
    if settings.templates is not None:
        return settings.templates
    benchmark = benchmark_of(settings)
    return (None if benchmark is None else benchmark.templates) or "openai"


def class_names(spec: str | Sequence[str]) -> list[str]:
    """The names that a setting gives: a list, 'imagenet' (open_clip's names), or a file with one a line.

    Raises:
        SettingsError: no such file, or fewer than 2 names.
    """
    if spec == "imagenet":
        from open_clip import IMAGENET_CLASSNAMES

        return list(IMAGENET_CLASSNAMES)
    names = _lines(spec, "classes") if isinstance(spec, str) else list(spec)
    if len(names) < 2:
        raise SettingsError(f"classes: {len(names)} given, classification takes at least 2")
    return names


def prompt_templates(spec: str | Sequence[str]) -> list[Template]:
    """The templates that a setting gives: a list, 'openai', 'simple', 'plain', or a file with one a line.

    Raises:
        SettingsError: no such file, or a template without {c} or {}.
    """
    if spec in ("openai", "simple"):
        import open_clip

        return list(open_clip.OPENAI_IMAGENET_TEMPLATES if spec == "openai" else open_clip.SIMPLE_IMAGENET_TEMPLATES)
    texts = ["{c}"] if spec == "plain" else _lines(spec, "templates") if isinstance(spec, str) else list(spec)
    for text in texts:
        if not has_place(text):
            raise SettingsError(f"templates: {text!r} has no {{c}} or {{}} where the class name goes")
    if not texts:
        raise SettingsError("templates: none given")
    return [_template(text) for text in texts]


def has_place(text: str) -> bool:
    """Whether a template says where the class name goes."""
    return "{c}" in text or "{}" in text


def _template(text: str) -> Template:
    return lambda name: text.replace("{c}", name).replace("{}", name)


def _lines(path: str, what: str) -> list[str]:
    """The lines of a text file that are not blank."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{what}: cannot read the file {path!r}: {error}") from error
    return [line.strip() for line in text.splitlines() if line.strip()]
