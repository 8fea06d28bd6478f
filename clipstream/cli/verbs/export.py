"""The verb export: write a model for transformers, ONNX, …, or precomputed features as Parquet or NumPy.

The flags; `export.run` exports both.
"""

from __future__ import annotations

from typing import Literal, get_args

from clipstream.config.command_line import CommandLine, OutPath, Verb, argument, flag, switch
from clipstream.utils.section import PathText, Section

Target = Literal["transformers", "onnx", "open_clip", "sentence-transformers"]


class ModelFlags(Section):
    """Export a model, and check it: 100 image files and texts go through the exported files in a process without
    clipstream, and the features are compared with the model's. `clipstream export model RUN …` is the same.
    """

    model: PathText = argument("run, checkpoint, ORG/NAME of the Hub, or any name of a model")
    out: OutPath | None = argument("folder to write into (default: exports/RUN-TARGET)", None)
    to: Target = flag(f"program that reads the files: {', '.join(get_args(Target))}", ..., form="TARGET")
    pretrained: PathText | None = flag("weights of a model that is named by a configuration", form="TAG")
    weights: Literal["trained", "averaged"] = flag("of a checkpoint", "trained")
    config: PathText | None = flag(
        "settings over the run's; RUN/config.yaml itself allows its Python code, commands and URLs", form="FILE"
    )
    data: PathText | None = flag("data of the check (default: those of the run, else drawn ones)", form="DATA")
    preprocess: Literal["none", "normalize", "resize"] = flag(
        "ONNX: what the graph of the image tower does of the preprocessing", "none"
    )
    int8: bool = switch("ONNX: also write graphs with dynamic int8 quantisation")
    license: str | None = flag("licence in the model card, an identifier of the Hub such as mit", form="ID")
    push_to_hub: str | None = flag("upload the folder, after the check, to this repository of the Hub", form="ORG/NAME")
    private: bool = switch("make this repository a private one, if it is new")


class FeaturesFlags(Section):
    """Export the features of a store written by `clipstream precompute`: OUT/PART/SOURCE-00000.parquet, or OUT/PART.npy
    with OUT/PART.keys.parquet. A row is a view of an image, or a caption.
    """

    store: PathText = argument("folder or URL of the store")
    out: OutPath = argument("folder to write into")
    format: Literal["parquet", "npy"] = flag("file format", "parquet")
    part: list[str] = flag("image, text, or a teacher's NAME.image or NAME.text (default: all)", [], many=True)
    dtype: Literal["float16", "float32"] | None = flag(
        "dtype of the features (default: float16 if stored as float16, else float32)"
    )
    captions: bool = switch("also write the captions")
    images: PathText | None = flag("also write thumbnails of the images of this data (Parquet)", form="DATA")
    rows: int | None = flag("approximate number of rows per Parquet file (default: all rows of a source)", ge=1)
    cache: OutPath | None = flag("folder for downloads of a remote store", form="FOLDER")


def export(command: CommandLine[ModelFlags] | CommandLine[FeaturesFlags]) -> None:
    from clipstream.export import run  # on use: --help imports no torch

    own = command.own
    run.export_model(own) if isinstance(own, ModelFlags) else run.export_features(own)


main = Verb(
    "export",
    ModelFlags,
    export,
    topics=(
        Verb("export model", ModelFlags, export),
        Verb("export features", FeaturesFlags, export),
    ),
)
