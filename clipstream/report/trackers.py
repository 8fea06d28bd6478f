"""Sinks for other tools: the experiment trackers Weights & Biases and Trackio.

Records and images enter; the figures of a run in the tracker leave. Metrics have the names that they have
in TensorBoard: train/loss, eval/val/top1, health/…, stages/….
"""

from __future__ import annotations

import importlib
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from clipstream.errors import SettingsError
from clipstream.report.settings import TrackioSettings, WandbSettings
from clipstream.report.sinks import Record, RunInfo, Sink, flat, markdown_table, scalars
from clipstream.utils import atomic_write

if TYPE_CHECKING:
    from clipstream.evals.context import Example, Table

WANDB_ID = "wandb_id"  # file with the id under which Weights & Biases knows the run


class Tracker(Sink):
    """A run of a tracker with the interface of Weights & Biases: `log`, `finish`, and images as `Image`.

    Args:
        module: of the tracker.
        run: as the module's `init` returns it.
        table: (title, header, rows) -> what the tracker shows as a table.
        images: images of the module with their texts -> what the tracker shows as several images.
    """

    def __init__(
        self, module: Any, run: Any, table: Callable[[Table], Any], images: Callable[[list[tuple[Any, str]]], Any]
    ) -> None:
        self._module, self._run, self._table, self._images = module, run, table, images

    def write(self, record: Record) -> None:
        if metrics := dict(scalars(record)):
            self._run.log(metrics, step=record["step"])

    def show(self, step: int, name: str, examples: Sequence[Example], tables: Sequence[Table] = ()) -> None:
        """Log the images with their texts, and the tables."""
        found: dict[str, Any] = {f"tables/{name}/{table.title}": self._table(table) for table in tables}
        if examples:
            found[f"pictures/{name}"] = self._images(
                [
                    (self._module.Image(one.pixels.permute(1, 2, 0).cpu().numpy(), caption=one.text), one.text)
                    for one in examples
                ]
            )
        if found:
            self._run.log(found, step=step)

    def close(self) -> None:
        self._run.finish()


def wandb_run(settings: WandbSettings, run: RunInfo) -> Tracker:
    """The run in Weights & Biases. A resumed run goes on under its id, which the run's folder keeps in `wandb_id`.

    Raises SettingsError: the package is missing, or the run cannot be started there, for example without a login.
    """
    wandb = _import("wandb")
    # Without a network, wandb waits for 90 s, and for 30 s a request; its login waits for two times 5 s besides.
    wait = float(os.environ.get("WANDB_INIT_TIMEOUT", "12"))
    path = run.folder / WANDB_ID
    if run.resume_step is None or not path.exists():
        atomic_write.replace(path, uuid.uuid4().hex[:16].encode())
    try:
        found = wandb.init(
            project=settings.project,
            name=run.folder.name,
            notes=settings.notes,
            config=dict(run.settings),
            dir=str(run.folder),
            id=path.read_text(encoding="utf-8").strip(),
            resume="allow",
            # `console` would take the terminal's progress bar for a file.
            settings=wandb.Settings(console="off", init_timeout=wait, x_graphql_timeout_seconds=wait),
        )
    except Exception as error:  # of many kinds: no login, no network, a broken settings file
        raise SettingsError(
            f"Weights & Biases could not start the run: {error}; run `wandb login`, or set WANDB_MODE=offline"
        ) from error
    return Tracker(
        wandb,
        found,
        table=lambda table: wandb.Table(list(table.header), [list(row) for row in table.rows]),
        images=lambda pairs: [image for image, _ in pairs],
    )


def trackio_run(settings: TrackioSettings, run: RunInfo) -> Tracker:
    """The run in Trackio, under its name in the project; a resumed run goes on there.

    Raises SettingsError: the package is missing, or the run cannot be started there.
    """
    trackio = _import("trackio")
    try:
        found = trackio.init(
            project=settings.project,
            name=run.folder.name,
            space_id=settings.space,
            config=_plain(run.settings),
            resume="never" if run.resume_step is None else "allow",
            embed=False,
        )
    except Exception as error:  # of many kinds: no login, no network, a folder that cannot be written
        raise SettingsError(f"Trackio could not start the run: {error}") from error
    return Tracker(
        trackio,
        found,
        table=lambda table: trackio.Markdown(markdown_table(table.header, table.rows)),
        # Trackio takes several images in a table alone.
        images=lambda pairs: trackio.Table(columns=["picture", "text"], data=[list(pair) for pair in pairs]),
    )


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by dotted key, as Trackio shows no nested ones; its own names begin with an underscore."""
    return dict(flat(settings, separator="."))


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SettingsError(f"{name} is not installed ({error}): pip install 'clipstream[{name}]'") from error
