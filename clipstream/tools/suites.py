"""Owns the suites of an evaluation: the files that name them, where their data sets lie, and which of these are there.

A suite is a file of settings with a section `evals` and nothing else that is new, so that a run takes it by --config.
It never fetches a data set: it says which command does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clipstream.config import Settings
from clipstream.data.settings import SourceSettings
from clipstream.data.shards import expand, local_path, scheme_of
from clipstream.errors import SettingsError
from clipstream.evals.settings import EvalSettings, MeanSettings, sources_of
from clipstream.world import World

ROOT = "CLIPSTREAM_EVALS"
SUITE, FOLDER, MISSING = "--suite", "--evals-root", "--missing"
OWN_FLAGS = {
    SUITE: "a file of evaluators, as configs/evals/robustness.yaml; may be given several times; evaluators that the "
    "run's own settings alone name are left out",
    FOLDER: f"folder of the suites' data sets, or an address, as hf://datasets/clip-benchmark; ${ROOT} unless given",
    MISSING: "error (the default) or skip: what becomes of data sets that are not there",
}


@dataclass(frozen=True)
class Suites:
    """What the command line says of suites.

    Attributes:
        files: their YAML files, in order.
        skip: whether data sets that are not there are left out.
    """

    files: tuple[str, ...]
    skip: bool

    @classmethod
    def of(cls, own: Mapping[str, str]) -> Suites:
        """From a verb's own flags; the data sets' folder becomes the environment's, which names of shards hold.

        Raises:
            SettingsError: a flag has another value than it may have, or no suite to belong to.
        """
        files = tuple(own[SUITE].split("\n")) if SUITE in own else ()
        for flag in (FOLDER, MISSING):
            if flag in own and not files:
                raise SettingsError(f"{flag}: of which suite? Give {SUITE} FILE as well")
        told = own.get(MISSING, "error")
        if told not in ("error", "skip"):
            raise SettingsError(f"{MISSING}: expected error or skip, not {told!r}")
        if (root := own.get(FOLDER)) is not None:
            os.environ[ROOT] = root.rstrip("/") if scheme_of(root) else str(Path(root).expanduser())
        return cls(files, told == "skip")

    @property
    def flags(self) -> list[str]:
        """The suites as flags of the settings."""
        return [word for file in self.files for word in ("--config", file)]

    def chosen(self, settings: Settings, trained: Sequence[str]) -> Settings:
        """The settings with the evaluators that are asked for, and whose data sets are there.

        Args:
            settings: with those of the suites and of the run.
            trained: the run's own files of settings.

        Raises:
            SettingsError: nobody says where the data sets lie, or some are not there and are not to be left out.
        """
        if not self.files:
            return settings
        places = {name: settings.places.of(("evals", name)) for name in settings.evals}
        files = tuple(f"{file}:" for file in trained)
        evals = {name: section for name, section in settings.evals.items() if not places[name].startswith(files)}
        _check_root(evals)
        gone = {name: text for name, section in evals.items() if (text := _absent(section))}
        if gone and not self.skip:
            shown = "\n".join(_advice(name, text, evals[name]) for name, text in gone.items())
            total = sum(bool(sources_of(section)) for section in evals.values())
            raise SettingsError(
                f"{len(gone)} of {total} data sets are missing:\n{shown}\n"
                f"bring them here, or leave them out by {MISSING} skip"
            )
        return settings.model_copy(update={"evals": _without(evals, gone)})


def check_same(settings: Settings, world: World) -> None:
    """Whether all ranks evaluate the same. Collective.

    Raises:
        SettingsError: they do not: ranks that wait for others in vain would tell nothing.
    """
    names = world.gather_objects([*settings.evals])
    if other := [rank for rank, found in enumerate(names) if found != names[0]]:
        raise SettingsError(f"rank {other[0]} finds other data sets than rank 0: is their folder shared?")


def _check_root(evals: Mapping[str, EvalSettings]) -> None:
    specs = " ".join(str(source.shards) for section in evals.values() for source in sources_of(section).values())
    if f"${{{ROOT}}}" in specs and not {ROOT, f"WDS_{ROOT}"} & os.environ.keys():
        raise SettingsError(f"where do the suite's data sets lie? Give {FOLDER} FOLDER, or set {ROOT}")


def _absent(section: EvalSettings) -> str | None:
    """What of an evaluator's data is not there; None where all is, or where only fetching it would tell."""
    return next((text for source in sources_of(section).values() if (text := _lacks(source))), None)


def _lacks(source: SourceSettings) -> str | None:
    try:
        shards = expand(source.shards)
    except SettingsError as error:
        return str(error)
    local = [path for shard in shards if (path := local_path(shard)) is not None]
    gone = [path for path in local if not os.path.exists(path)]
    return f"{len(gone)} of {len(shards)} shards are not there: {gone[0]}{' …' * (len(gone) > 1)}" if gone else None


def _advice(name: str, text: str, section: EvalSettings) -> str:
    root = os.environ.get(ROOT, "")
    fetch = None if scheme_of(root) else (section.fetch or "").replace(f"${{{ROOT}}}", root)
    return f"  {name}: {text}" + (f"\n    {fetch}" if fetch else "")


def _without(evals: Mapping[str, EvalSettings], gone: Mapping[str, str]) -> dict[str, EvalSettings]:
    """The evaluators but those that are gone, which no mean is of any more."""
    kept: dict[str, EvalSettings] = {}
    said = [f"{name} is left out: {text}" for name, text in gone.items()]
    for name, section in evals.items():
        if isinstance(section, MeanSettings) and section.of.keys() & gone.keys():
            of = {part: metric for part, metric in section.of.items() if part not in gone}
            said.append(f"{name} is the mean of {len(of)} of {len(section.of)} sets" if of else f"{name} is left out")
            section = section.model_copy(update={"of": of})
            if not of:
                continue
        if name not in gone:
            kept[name] = section
    if World.from_env().rank == 0:
        print(*(f"warning: {text}" for text in said), sep="\n", end="\n" * bool(said), file=sys.stderr, flush=True)
    return kept
