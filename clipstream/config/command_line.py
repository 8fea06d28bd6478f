"""The verbs of the command line, and the start and end of each: help, flags, settings, errors on stderr, exit code.

A `Verb` and a command line enter; an exit code leaves. Imports no torch: a verb does so once its settings are valid.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import inspect
import io
import itertools
import math
import os
import pkgutil
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Annotated, Any, Generic, TypeVar

from pydantic import AfterValidator, Field, ValidationError

from clipstream.config.config_file import non_defaults, secrets
from clipstream.config.help import help_text, is_list, spellings, trait, usage
from clipstream.config.plan import choose_by_size, survey
from clipstream.config.settings import Settings, Written, plain, read
from clipstream.config.short_flags import BY_FLAG
from clipstream.config.value_tree import Node, enumerate_words, format_errors, to_yaml
from clipstream.distributed.failure import tell_once
from clipstream.distributed.signals import SIGNALS, EndProcess
from clipstream.distributed.world import World
from clipstream.errors import (
    INTERRUPTED,
    ClipstreamError,
    SettingsError,
    Stopped,
    WorkInterrupted,
    did_you_mean,
    errors_as,
)
from clipstream.text import counted, printable, printable_lines
from clipstream.utils import atomic_write
from clipstream.utils.atomic_write import keep_inputs
from clipstream.utils.logs import drop_output, loading, logger, on_terminal, set_level
from clipstream.utils.processes import many_files
from clipstream.utils.section import Section, own_path

Own = TypeVar("Own", bound=Section)
OutPath = Annotated[str, AfterValidator(own_path)]
FLAG, ALL = "--print-config", "all"
_own_process = False  # whether its signals are handled here
_debug = False  # whether errors have tracebacks


class Printed(Exception):
    """Help or settings, which the command line requests, are printed: the verb ends with exit code 0."""


@dataclass(frozen=True)
class CommandLine(Generic[Own]):
    """The command line of a verb."""

    verb: str  # the words after `clipstream`
    own: Own  # its own flags and arguments
    flags: list[str]  # those of settings
    print_all: bool | None  # whether --print-config prints all settings; None without it

    def load(self, flags: Sequence[str] | None = None, ranks: int | None = None, run: Path | None = None) -> Written:
        """The settings of flags, `self.flags` unless given. Sets the level of messages, and logs notices.

        Raises:
            SettingsError: as `load`.
            Printed: by --print-config.
        """
        written = read(self.flags if flags is None else flags, ranks=ranks, run=run)
        begin_log(written)
        self.print_settings(written)
        return written

    def print_settings(self, written: Written) -> None:
        """Print the settings and raise `Printed`, if --print-config was given."""
        if self.print_all is not None:
            ranks = World.from_env().size
            values, choices = choose_by_size(survey(written), ranks) if self.verb == "train" else (written.settings, ())
            lines = [f"chosen: {reason} sets it" for *_, reason in choices]
            print_config(Written(values, written.places), self.verb, self.print_all, lines)
            raise Printed


@dataclass(frozen=True)
class Verb(Generic[Own]):
    """A verb, or a topic of one: its module's `main`.

    Called with a command line, by default the process's, it returns the exit code, as `run_main`.
    """

    name: str  # the words after `clipstream`
    own: type[Own]  # its own flags and arguments; the docstring says what the verb does
    run: Callable[[CommandLine[Own]], int | None]  # returns the exit code; None is 0, and all errors are raised
    themes: tuple[str, ...] = ()  # keys of `help.THEMES`, of the settings that it takes; without them it takes none
    topics: tuple[Verb[Any], ...] = ()  # by the word after its own name, such as `train` in `clipstream bench train`
    within: str = ""  # the beginning of the keys of these settings, for a verb that does not take all

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        return run_main(self.start, argv)

    def start(self, argv: Sequence[str]) -> int:
        """Run a command line in this process.

        Raises:
            SettingsError: a flag is wrong, or there is no such section of help.
            Printed: by `--help`, `--help all` or `--help SECTION`.
        """
        topics = {topic.name.rpartition(" ")[2]: topic for topic in self.topics}
        if argv and argv[0] in topics:
            return topics[argv[0]].start(argv[1:])
        no_arguments = usage(self.name, self.own) == f"clipstream {self.name}"
        if argv and no_arguments and not argv[0].startswith("-") and (near := did_you_mean(argv[0], topics)):
            raise SettingsError(f"unknown topic {self.name} {argv[0]}{near}")
        for flag, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
            name, equals, about = flag.partition("=")
            if name in ("--help", "-h"):
                about = about if equals or following.startswith("-") or not self.themes else following
                sys.stdout.write(help_text(Settings, self, about))
                raise Printed
        print_all, rest = take_flag(argv) if self.themes else (None, argv)
        own, flags = read_own(self.name, self.own, rest, self.within if self.themes else None)
        return self.run(CommandLine(self.name, own, flags, print_all)) or 0


def flag(
    meaning: str,
    default: Any = None,
    *,
    form: str = "",
    also: str = "",
    many: bool = False,
    bare: Any = None,
    **more: Any,
) -> Any:
    """A field of a verb's flags: `--NAME VALUE`, by its name with dashes.

    Args:
        form: its value in the help, where the annotation says too little.
        also: another spelling, such as '-k'.
        many: of a list, several values may follow the flag; else each has a flag of its own.
        bare: the value of the flag alone.
        more: arguments of pydantic's `Field`.
    """
    extra = {"form": form, "also": also, "many": many, "bare": bare}
    return Field(default, description=meaning, json_schema_extra=extra, **more)


def switch(meaning: str) -> Any:
    """A field of a verb that its flag alone makes true."""
    return flag(meaning, False, bare=True)


def argument(meaning: str, default: Any = ...) -> Any:
    """A field of a verb that is given by its position, and shown in capitals; a list takes all words that are left."""
    return Field(default, description=meaning, json_schema_extra={"argument": True})


def read_own(verb: str, own: type[Own], argv: Sequence[str], within: str | None) -> tuple[Own, list[str]]:
    """A verb's own flags and arguments, and the rest of the command line: flags of settings, with what follows each.
    `within` begins the keys of settings whose flags the verb takes, '' for all; None: it takes none.

    Raises SettingsError: with one line for each mistake.
    """
    spelled = ((name, word) for name, field in own.model_fields.items() for word in spellings(name, field))
    flags = {word: name for name, word in spelled if word[0] == "-"}
    tree, problems, found, rest, words = Node(), list[str](), list[str](), list[str](), list(argv)

    def following(most: float = math.inf) -> list[str]:
        taken: list[str] = []
        while words and len(taken) < most and not words[0].startswith("--") and words[0].partition("=")[0] not in flags:
            taken.append(words.pop(0))
        return taken

    while words:
        word, equals, text = (token := words.pop(0)).partition("=")
        if word in flags:
            field = own.model_fields[flags[word]]
            several, bare = is_list(field), trait(field, "bare")
            given = [text] if equals else []
            kind = bool if bare is True else (int, float)  # a value may follow such a flag
            if not equals and (bare is None or (words and isinstance(Node.of_text(words[0], "").value, kind))):
                given = following(math.inf if trait(field, "many") else 1)
            nodes = [Node.of_text(one, word) for one in given] or [Node.of(bare, word)]
            if not all(given) or (bare is None and not given):
                problems.append(f"{word}: requires a value: {field.description}")
            else:
                before = tree.at((flags[word],)) or Node([])
                tree.put((flags[word],), Node([*before.value, *nodes], word, word) if several else nodes[0])
        elif not token.startswith("-"):
            found.append(token)
        elif _sets(word, within) and (word in BY_FLAG or not difflib.get_close_matches(word, flags, 1, 0.85)):
            rest += [token, *([] if equals else following())]
        else:
            near = did_you_mean(word, flags) or f"; see clipstream {verb} --help"
            problems.append(f"{word}: unknown flag{near}")
            following()
    for name, field in own.model_fields.items():
        if trait(field, "argument") and found:
            several, place = is_list(field), name.upper()
            nodes = [Node.of_text(one, place) for one in found]
            tree.put((name,), Node(nodes, place, place) if several else nodes[0])
            found = [] if several else found[1:]
    if found and within is None:
        problems.append(f"unexpected argument {found[0]!r}: {usage(verb, own)}")
    rest[:0] = found  # which `split` refuses
    values = plain(own, tree)
    try:
        made = own.model_validate(values)
    except ValidationError as error:
        lacks = [str(one["loc"][0]) for one in error.errors() if one["type"] == "missing" and not problems]
        problems += [f"missing {spellings(name, own.model_fields[name])[0]}: {usage(verb, own)}" for name in lacks]
        problems += [line for line in format_errors(own, values, error, tree) if not line.endswith("missing: required")]
    if problems:
        raise SettingsError(enumerate_words(problems))
    return made, rest


def _sets(flag: str, within: str | None) -> bool:
    """Whether a flag sets keys that begin with `within` only."""
    alias = BY_FLAG.get(flag)
    keys = (flag.removeprefix("--").replace("-", "_"),) if alias is None else alias.keys
    return within is not None and all(f"{key}.".startswith(within) for key in keys)


def output_file(path: str | Path | None, flag: str, words: Iterable[bytes] = ()) -> Path | None:
    """The file that a flag names; None if the flag is not given.

    Raises SettingsError: the file cannot be written, or as `claim_output`, which takes the words.
    """
    if not path:
        return None
    atomic_write.claim_output(path, flag, words=words)
    with errors_as(SettingsError, f"{flag}: cannot write {path}", OSError):
        if World.from_env().is_main:
            atomic_write.probe(Path(path))
    return Path(path)


def begin_log(written: Written) -> None:
    """Set the level of messages, and whether errors have tracebacks; log notices about flags without effect."""
    global _debug
    _debug = written.settings.run.debug
    set_level(written.settings.log.level)
    for text in written.places.notices if World.from_env().is_main else ():
        logger.info(f"notice: {text}")


def take_flag(argv: Sequence[str]) -> tuple[bool | None, list[str]]:
    """(True for `--print-config all`, False for `--print-config`, None without it; the rest of the command line).

    Raises SettingsError: the flag has another value than `all`.
    """
    rest = list(argv)
    places = [place for place, token in enumerate(rest) if token.partition("=")[0] == FLAG]
    if not places:
        return None, rest
    value = rest.pop(places[0]).partition("=")[2]
    if len(places) > 1 or value not in ("", ALL):
        raise SettingsError(f"{FLAG}: expected once, alone or as {FLAG} {ALL}")
    if rest[places[0] : places[0] + 1] == [ALL]:
        value = rest.pop(places[0])
    return value == ALL, rest


def print_config(written: Written, verb: str, every: bool, comments: Sequence[str] = ()) -> None:
    """Print the settings on rank 0, all or those that differ from the defaults, below the comments. A password is
    printed too, with a warning on stderr.
    """
    settings, world = written.settings, World.from_env()
    if not world.is_main:
        return
    if keys := secrets(settings):
        advice = "use an environment variable, ${NAME}, instead"
        logger.warning(f"{', '.join(keys)} has a password or key, which is in this output: {advice}")
    what = "all settings" if every else f"settings that differ from the defaults ({FLAG} {ALL} prints all)"
    print(f"# clipstream {verb}: {what}")
    if written.places.place_of(("data", "global_batch_size")) == "--batch-size":
        print(f"# data.global_batch_size is --batch-size x --accum-freq x {counted(world.size, 'rank')}")
    tree = settings.model_dump(mode="json") if every else non_defaults(settings)
    print("".join(f"# {line}\n" for line in comments) + to_yaml(tree), end="")


# What a disk answers to a write, as the C library and Rust's standard library word it.
_REFUSED = re.compile("No space left on device|File too large|Disk quota exceeded|Read-only file system")


def run_main(main: Callable[[list[str]], int], argv: Sequence[str] | None = None) -> int:
    """Run a verb with a command line without the program's name, by default the process's; return its exit code.

    A `ClipstreamError` is printed to stderr as `error: …`, with the rank if there are several, and with a traceback
    only if `run.debug` is set; of the ranks of a node that have the same error, one prints it. `Stopped` is printed
    without `error:`. A disk that refuses a write is one line as well. Any other exception is a bug and is not caught.
    """
    global _debug
    argv = list(sys.argv[1:] if argv is None else argv)
    _debug = any(word in ("--debug", "--run.debug", "--run.debug=true") for word in argv)  # until settings are read
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the program that started this one (`>&-`)
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # file names may be unprintable
        sys.stdout.reconfigure(errors="backslashreplace")
    world = World.of_launcher()
    rank = world.rank if world.size > 1 else None
    said, trace, code = None, "", 0
    try:
        with on_terminal(rank), many_files(), keep_inputs(), loading, contextlib.suppress(Printed):
            code = main(argv)
        sys.stdout.flush()
    except ClipstreamError as error:
        trace = printable_lines(traceback.format_exc(), 1 << 20) + "\n" if _debug else ""
        said, code = str(error) if isinstance(error, Stopped) else f"error: {error}", error.exit_code
    except WorkInterrupted as error:
        said, code = str(error), error.exit_code
    except KeyboardInterrupt:
        said, code = "interrupted", INTERRUPTED
    except BrokenPipeError:
        drop_output(sys.stdout)  # the reader (`| head`) has gone
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            said = f"error: invalid file name {printable(error.filename, 60)}: {error.strerror}"
            code = SettingsError.exit_code
        elif found := _REFUSED.search(str(error)):  # also of libraries that raise errors of their own
            name = printable(getattr(error, "filename", None) or "a file", 200)
            said = f"error: cannot write {name}: {found[0]}; choose a place with more room"
            code = ClipstreamError.exit_code
        else:
            raise
    if _own_process:
        _keep_exit_code(code, alone=rank is None)
    if said is not None:
        prefix = "" if rank is None else f"[rank {rank}] "
        tell = partial(print, f"{trace}{printable_lines(f'{prefix}{said}')}", file=sys.stderr, flush=True)
        if rank is not None and said.startswith("error: "):
            tell_once(world, said, tell)
        else:
            tell()
    return code


def handle_signals(verb: str) -> None:
    """Handle the signals of this process from its start until the verb handles them; called by the process's `main`.

    Training ends with one line and exit code 75. SIGTERM and SIGHUP raise SystemExit in verbs that write files by
    themselves.
    Ctrl-C raises KeyboardInterrupt in all verbs but training. A signal that the parent process ignores stays ignored,
    as Ctrl-C in a shell's background jobs.
    """
    global _own_process
    _own_process = True
    if verb == "train":
        end = EndProcess(Stopped.exit_code, str(Stopped.before_training("{}")) if World.of_launcher().is_main else "")
        for number in SIGNALS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, end)
    elif verb in ("bench", "export", "filter", "label", "search"):
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):  # a terminal that was closed
        print(f"stopped by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    raise SystemExit(128 + number)


def _keep_exit_code(code: int, *, alone: bool) -> None:
    """Let no signal change the exit code while the interpreter ends.

    A launcher sends SIGTERM once another rank has ended. It is ignored, as Python gives handlers up when it finalizes.
    """
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            ends = number == signal.SIGINT or (number == signal.SIGTERM and alone)
            signal.signal(number, EndProcess(code) if ends else signal.SIG_IGN)


class CallableModule(ModuleType):
    """A module that passes calls to a function, whose documentation it has."""

    place: str  # MODULE:FUNCTION

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @property
    def function(self) -> Any:
        """The function, imported when it is asked for."""
        return pkgutil.resolve_name(self.place)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.function)

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        return str(self.function.__doc__)


def make_callable(name: str, place: str) -> None:
    """Make the module `name` callable, as the function `place` (MODULE:FUNCTION); called as the module is imported."""
    module = sys.modules[name]
    module.__class__ = CallableModule
    module.place = place  # type: ignore[attr-defined]
