"""`Run`: the folder of a run, read when something is asked for; and `clipstream.train`, which makes one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clipstream.checkpoint import store
from clipstream.config.settings import Config, Overrides, Settings, load, settings_from
from clipstream.config.validate import prepare_run
from clipstream.distributed.failure import FailureWatch
from clipstream.distributed.launch import run_embedded
from clipstream.distributed.world import World
from clipstream.errors import SettingsError, Stopped, wrong_type
from clipstream.report.html_report import REPORT_FILE, read_run, render, write_page
from clipstream.report.records import METRICS_FILE, lines
from clipstream.text import frame
from clipstream.utils.logs import on_terminal, set_level

if TYPE_CHECKING:
    import pandas

Kind = Literal["metrics", "evaluations"]


@dataclass(frozen=True)
class Run:
    """A run's folder: finished, running or stopped. What it returns is read anew each time.

    Examples:
        >>> import clipstream
        >>> run = clipstream.Run.open("runs/first")
        >>> run.status, run.step
        ('done', 3)
        >>> run.settings.optim.lr
        0.001
        >>> [path.name for path in run.checkpoints]
        ['step_00000003']

    Attributes:
        folder: the run's folder, LOGS/NAME.
    """

    folder: Path

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | os.PathLike):
            raise wrong_type("folder", "the path of a run", self.folder)
        object.__setattr__(self, "folder", Path(self.folder))

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Run:
        """The run in a folder.

        Args:
            folder: of the run (`runs/NAME`), or of one of its checkpoints.

        Raises SettingsError: there is no run.
        """
        path = Path(os.path.expanduser(cls(folder).folder))  # type: ignore[arg-type]
        for place in (path, path.absolute().parent.parent):
            if (place / METRICS_FILE).is_file():
                return cls(place)
        raise SettingsError(f"{path} is not a run folder: {METRICS_FILE} is missing")

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def name(self) -> str:
        """The run's name, which is its folder's."""
        return self.folder.resolve().name

    @property
    def settings(self) -> Settings:
        """The resolved settings, from config.yaml, whose plug-ins are imported. Raises SettingsError."""
        file = self.folder / "config.yaml"
        if not file.is_file():
            raise SettingsError(f"{self.folder} has no config.yaml: start the run again")
        return load(["--config", str(file)])

    @property
    def status(self) -> str:
        """'done', 'stopped', 'failed', 'diverged', 'running', or 'unrecorded' if the run was killed."""
        return read_run(self.folder).status

    @property
    def step(self) -> int:
        """The step of the last training line; 0 if there is none."""
        return read_run(self.folder).steps

    def records(self) -> Iterator[dict[str, Any]]:
        """All records of metrics.jsonl, in order: starts, training lines, evaluations, data health and ends."""
        return (dict(record) for _, record in lines(self.folder / METRICS_FILE))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The training lines: step, samples, loss, lr, grad_norm, samples_per_s and more."""
        return [record for record in self.records() if "loss" in record and "eval" not in record]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The evaluations: step, `eval` (the evaluator's name) and its metrics, or `error`."""
        return [record for record in self.records() if "eval" in record]

    def to_pandas(self, kind: Kind = "metrics") -> pandas.DataFrame:
        """Training lines or evaluations as a data frame, a row each.

        Args:
            kind: 'metrics' or 'evaluations'.

        Raises ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("Run.to_pandas requires pandas: pip install pandas") from error
        return pandas.DataFrame(self.metrics if kind == "metrics" else self.evaluations)

    @property
    def checkpoints(self) -> list[Path]:
        """The folders of the whole checkpoints, oldest first."""
        return store.whole(self.folder / "checkpoints")[::-1]

    @property
    def latest(self) -> Path | None:
        """The folder of the newest whole checkpoint; None if there is none."""
        found = self.checkpoints
        return found[-1] if found else None

    @property
    def best(self) -> Path | None:
        """The folder of the best checkpoint by `checkpoint.keep_best`; None if no evaluation has chosen one."""
        found = store.read_pointer(self.folder / "checkpoints" / store.BEST)
        return found if found is not None and store.marker_of(found) is not None else None

    @property
    def report(self) -> Path:
        """The path of report.html, which is written if it is not there."""
        path = self.folder / REPORT_FILE
        if not path.is_file():
            write_page(path, [read_run(self.folder)])
        return path

    def _repr_html_(self) -> str:
        """The report, for notebooks."""
        return frame(render([read_run(self.folder)]), f"Report of {self.name}")


def train(config: Config = None, overrides: Overrides = None, /, **flags: Any) -> Run:
    """Train a model, evaluate it and save it, as `clipstream train` does, in this process.

    The process may be a script, which needs no `if __name__ == "__main__"`, a notebook, or a rank of torchrun: then
    every rank calls it, and gets the run once rank 0 has written all of its files. Ctrl-C, or "interrupt" in a
    notebook, saves the last completed step and raises KeyboardInterrupt; a second one ends at once. Signal handlers,
    log handlers, torch's threads and random states are afterwards what they were before.

    Args:
        config: a YAML file, several of them, a mapping of sections, or `Settings`.
        overrides: keys of the settings and their values, which replace those of `config`: `{"optim.lr": 1e-3}`, or
            nested as in YAML. A class of your own may stand where settings take `module:Name`.
        flags: short flags of the command line, with underscores: `train_data="shards/*.tar"`, `batch_size=256`. They
            replace values of `config` and `overrides`; None stands for a flag that is not given.

    Returns:
        The run: its folder, metrics, checkpoints and report.

    Raises:
        SettingsError: the settings are wrong; the message has a line for each mistake.
        DataError: the data have no usable sample, fail too often or stall.
        DivergedError: the loss is not finite.
        Stopped: SIGTERM, SIGUSR1 or SIGHUP stopped the run, which is saved.
        KeyboardInterrupt: Ctrl-C stopped the run, which is saved if a step was completed.

    Examples:
        >>> import clipstream
        >>> run = clipstream.train(
        ...     "my.yaml", {"optim.lr": 1e-3}, train_data="shards/*.tar", steps=3, name="first"
        ... )
        >>> run
        Run('runs/first')
        >>> [line["step"] for line in run.metrics]
        [3]
        >>> run.latest
        PosixPath('runs/first/checkpoints/step_00000003')
    """
    from clipstream.train import train_rank  # imports torch

    folders = []

    def body(world: World, watch: FailureWatch) -> None:
        folders.append(train_rank(found, world, watch))
        world.barrier()  # rank 0 writes the folder that every rank returns

    with on_terminal():
        written = settings_from(config, overrides, flags)
        set_level(written.settings.log.level)
        found = prepare_run(written)
        try:
            run_embedded(found.settings.run, body)
        except Stopped as stopped:
            if stopped.signal != "SIGINT":
                raise
            text = str(stopped).replace("the same command with --resume latest", 'the same call with resume="latest"')
            raise KeyboardInterrupt(text.replace("--resume latest", 'resume="latest"')) from None
    return Run(folders[0])
