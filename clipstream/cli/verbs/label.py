"""The verb label: name the images of a folder among classes, with scores, the least certain first.

The flags; `images.LabelledImages` does the work.
"""

from __future__ import annotations

import os
from pathlib import Path

from clipstream.config.command_line import CommandLine, OutPath, Verb, argument, flag, output_file
from clipstream.config.help import READING
from clipstream.config.value_tree import enumerate_words, read_yaml
from clipstream.curation.image_index import ImageSearch
from clipstream.curation.images import LABEL, LabelledImages
from clipstream.data.decode.class_names import AS_LIST, class_names, duplicate_names, fold_name, unreadable_names
from clipstream.data.source_settings import IMAGE_KEY
from clipstream.errors import SettingsError, errors_as
from clipstream.text import counted, listed, printable
from clipstream.utils.atomic_write import claim_output, replace
from clipstream.utils.logs import loading, logger
from clipstream.utils.section import PathText, Section

COLUMNS = {LABEL, "score", "probability", "shard", "key", *IMAGE_KEY.split(";")}  # not the names of attributes


class LabelFlags(Section):
    """`clipstream label runs/first photos --classes names.txt` writes the class of each image to labels.csv, the least
    certain ones first. Correct them, and `clipstream evaluate RUN labels.csv --classes-from label` reads the file.
    """

    run: PathText = argument("a run or its folder, a checkpoint, or a model's name")
    data: str = argument("what training reads: a folder, a table, tars")
    classes: PathText | None = flag("names of classes, one a line, as JSON or as CSV; or imagenet", form="FILE")
    templates: PathText = flag(
        "prompts of the classes with {c} for the name: a file, openai (80), simple (7) or plain (1)", "openai"
    )
    attributes: PathText | None = flag(
        "YAML or JSON, NAME: [TEXT, TEXT…]: a column for each name, with the text that matches best", form="FILE"
    )
    out: OutPath = flag("CSV to write", "labels.csv", form="FILE")
    html: OutPath | None = flag("write a page with images of each class to this file", form="FILE")
    k: int = flag("images of each class that --html shows", 12, ge=1, also="-k")
    links: OutPath | None = flag(
        "a new folder, for symbolic links to the images in a folder for each class (or text of the first attribute)",
        form="FOLDER",
    )


def read_attributes(file: str) -> dict[str, list[str]]:
    """The texts of each attribute. Raises SettingsError: with a line for each mistake in the file."""
    problems: list[str] = []
    found: dict[str, list[str]] = {}
    for name, node in read_yaml(file, problems).value.items():
        items = node.value if isinstance(node.value, list) else []
        plain = [
            str(one.value if one.text is None else one.text) for one in items if not isinstance(one.value, list | dict)
        ]
        found[name] = texts = [text for text in plain if text.strip()]
        if len(texts) < 2 or len({*map(fold_name, texts)}) < len(items):
            problems.append(f"{node.place}: {name}: expected a list of at least 2 different texts")
        if name.casefold() in COLUMNS or name.endswith("margin"):
            problems.append(f"{node.place}: {name} is another column of the table: name the attribute otherwise")
    if not found and not problems:
        problems.append(f"{file}: no attributes, NAME: [TEXT, TEXT…]")
    if problems:
        raise SettingsError(enumerate_words([text.replace("--config", "--attributes") for text in problems]))
    return found


def label(command: CommandLine[LabelFlags]) -> None:
    own, columns = command.own, dict[str, tuple[list[str], str]]()
    if own.classes is None and own.attributes is None:
        raise SettingsError("what to look for is missing: set --classes FILE, --attributes FILE, or both")
    if Path(own.out).suffix.lower() != ".csv":
        raise SettingsError(f"--out: {own.out}: expected a name that ends with .csv")
    output_file(own.out, "--out", (b"margin",))
    output_file(own.html, "--html")
    if own.links is not None:
        claim_output(own.links, "--links", holds=True)
        if Path(own.data).resolve() in Path(own.links).resolve().parents:
            raise SettingsError(f"--links: {own.links} is in {own.data}, and would be read by the next call")
        if os.path.lexists(own.links) and (not os.path.isdir(own.links) or os.listdir(own.links)):
            raise SettingsError(f"--links: {own.links} exists: name a new folder, or remove it")
    if own.classes is not None:
        for key, why in unreadable_names(own.classes, own.templates).items():
            raise SettingsError(f"--{key}: {why.removesuffix(AS_LIST)}")
        columns[LABEL] = names, _ = class_names(own.classes), own.templates
        if twice := duplicate_names(names):
            logger.warning(f"--classes: {twice}; each is one class")
    if own.attributes is not None:
        columns |= {name: (texts, "plain") for name, texts in read_attributes(own.attributes).items()}
    found = LabelledImages(ImageSearch(own.run, own.data, tuple(command.flags)), columns, Path(own.out))
    if own.links is not None and not found.in_files:
        raise SettingsError(f"--links: images of {own.data} are no files of their own")
    loading.end()
    with errors_as(SettingsError, "cannot write", OSError):
        found.save()
        if own.html is not None:
            replace(Path(own.html), found.page(own.k).encode(errors="backslashreplace"))
        if own.links is not None:
            found.link(Path(own.links))
    if found.unreadable:
        said = f"{counted(len(found.unreadable), 'sample')} without a readable image, at the end of {own.out}"
        logger.warning(f"{said} without a label")
    if not found.in_files:
        logger.warning(f"{own.out} names images in other files by shard and key, from which evaluate cannot read them")
    counts = [f"{printable(name, 40)} {len(rows):,}" for name, rows in found.groups().items()]
    print(
        f"{len(found.images):,} images: {listed(counts, 12)}", *filter(None, (own.out, own.html, own.links)), sep="\n"
    )


main = Verb("label", LabelFlags, label, (*READING, "Model", "Device and precision"))
