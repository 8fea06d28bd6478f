"""The verb `clipstream evaluate --checkpoint RUN | --watch RUN` (see `tools.evaluate` and `tools.watch`), and
the function `clipstream.evaluate`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from clipstream.config.entry import run_main, show_help
from clipstream.config.python_settings import Config, settings_from
from clipstream.config.settings import Settings
from clipstream.config.validate import validate_evals
from clipstream.errors import SettingsError, each
from clipstream.tools.evaluate import OWN_FLAGS
from clipstream.tools.evaluate import evaluate as evaluate_command
from clipstream.tools.watch import OWN_FLAGS as WATCH_FLAGS
from clipstream.tools.watch import follow
from clipstream.utils.logs import on_terminal

if TYPE_CHECKING:
    from clipstream.api.model import Model, Source


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb, and return its exit code."""
    return run_main(_main, argv)


def _main(argv: list[str]) -> int:
    if show_help("evaluate", argv, {**OWN_FLAGS, **WATCH_FLAGS}):
        return 0
    if any(token.partition("=")[0] in WATCH_FLAGS for token in argv):
        return follow(argv)
    return evaluate_command(argv)


def evaluate(
    model: Model | Source, evaluators: str | Sequence[str] | Mapping[str, Any] | Config, /, **flags: Any
) -> dict[str, dict[str, float]]:
    """Evaluate a model, as training does.

    Where the program has made a process group, every rank calls this, and each evaluates a part of the data.

    Args:
        model: of `clipstream.load_model`, or what that takes: a run, a checkpoint's folder, a name.
        evaluators: the section `evals` of the settings, `{NAME: {"type": "zero_shot", "data": {"shards": …}, …}}`; a
            YAML file that has one; or shards, on which retrieval is evaluated under the name `val`.
        flags: short flags of the command line, with underscores, such as `caption_json` on how shards are read.

    Returns:
        The metrics of each evaluator, by name.

    Raises:
        SettingsError: the evaluators' settings are wrong.
        DataError: an evaluator's data are missing, broken or not usable.

    Examples:
        >>> import clipstream
        >>> model, preprocess, tokenizer = clipstream.load_model("runs/first", device="cpu")
        >>> figures = clipstream.evaluate(model, "val/*.tar", workers=0)
        >>> figures["val"]["n"], 0 <= figures["val"]["image_to_text_R@1"] <= 1
        (16, True)
        >>> section = {"loss": {"type": "loss", "data": {"shards": "val/*.tar"}, "global_batch_size": 8}}
        >>> clipstream.evaluate(model, section, workers=0)["loss"]["val_loss"] > 0
        True
    """
    from clipstream.api.model import evaluate_model

    with on_terminal():
        settings = settings_from(*_config(evaluators, flags), trains=False)
        if not settings.evals:
            raise SettingsError("there is no evaluator: give shards, or a section evals with at least one")
        validate_evals(settings, shown=False)
        return evaluate_model(model, settings)


def _config(evaluators: Any, flags: Mapping[str, Any]) -> tuple[Config, None, dict[str, Any]]:
    """The arguments of `settings_from`."""
    if isinstance(evaluators, Mapping):
        return {"evals": evaluators}, None, dict(flags)
    if isinstance(evaluators, Settings):
        return evaluators, None, dict(flags)
    expected = "a section evals, a YAML file, or shards"
    names = [os.fspath(name) for name in each("evaluators", expected, evaluators, (str, os.PathLike))]
    if all(name.endswith((".yaml", ".yml")) for name in names):
        return names, None, dict(flags)
    return None, None, {"val_data": names, **flags}
