"""Settings of how an image becomes pixels: its transform, and training's augmentation. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from clipstream.utils.section import SET, Conflict, PluginSection, Section, other_than, part

Share = Annotated[float, Field(ge=0, le=1)]
MAX_PIXELS = 178_956_970  # from which Pillow refuses an image as a decompression bomb (a quarter of 2 GiB of RGBX)

LARGE_PIXELS = MAX_PIXELS // 2  # from which `check` names an image, as Pillow warns of it


class ImageTransformSettings(PluginSection):
    """How an image becomes pixels of the model's size. `type` may be a user's own `package.module:Name`."""

    type: str = "default"


@part(ImageTransformSettings, "default")
class DefaultImageTransform(ImageTransformSettings):
    """The random crop of data.augment in training, the model's own preprocessing in evaluation."""

    type: Literal["default"] = "default"


class AugmentSettings(Section):
    """Training's image transform: a random crop, resized to the model's size."""

    enabled: bool = Field(True, description="random augmentation; false: the preprocessing of evaluation")
    scale: tuple[float, float] = Field((0.9, 1.0), description="area of the crop relative to the image, min and max")
    ratio: tuple[float, float] = Field((0.75, 4 / 3), description="aspect ratio of the crop, min and max")
    interpolation: Literal["random", "bilinear", "bicubic"] = Field(
        "bicubic", description="interpolation of the resize"
    )
    flip: Share = Field(0.0, description="probability of a horizontal flip")
    color_jitter: tuple[Share, Share, Share, Share] | None = Field(
        None,
        description="strengths of brightness, contrast, saturation and hue (at most 0.5), as in torchvision; "
        "one number sets the first three",
    )
    color_jitter_prob: Share = Field(0.0, description="probability of color jitter")
    gray_scale_prob: Share = Field(0.0, description="probability of conversion to grayscale")

    @field_validator("scale", "ratio")
    @classmethod
    def _ordered(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 < value[0] <= value[1]:
            raise ValueError("min and max must be positive, and min <= max")
        return value

    @field_validator("color_jitter", mode="before")
    @classmethod
    def _of_three(cls, value: Any) -> Any:
        """One strength is that of brightness, contrast and saturation; three leave hue as it is (as in timm)."""
        alike = isinstance(value, int | float) and not isinstance(value, bool)
        found = ([value] * 3 if value else None) if alike else value
        return [*found, 0] if isinstance(found, list | tuple) and len(found) == 3 else found

    @field_validator("color_jitter")
    @classmethod
    def _half_a_turn(cls, value: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if value is not None and value[3] > 0.5:
            raise ValueError("the strength of hue must be at most 0.5")
        return value

    @field_validator("scale")
    @classmethod
    def _inside(cls, value: tuple[float, float]) -> tuple[float, float]:
        if value[1] > 1:
            raise ValueError("max must be at most 1")
        return value

    pairs: ClassVar[tuple[Conflict, ...]] = (
        Conflict({"color_jitter_prob": SET, "color_jitter": None},
                 "requires data.augment.color_jitter, e.g. --data.augment.color-jitter '[0.4, 0.4, 0.4, 0.1]'"),
        Conflict({"color_jitter": SET, "color_jitter_prob": 0},
                 "requires data.augment.color_jitter_prob above 0"),
    )  # fmt: skip


AugmentSettings.pairs += tuple(
    Conflict({key: other_than(field.default), "enabled": False},
             "has no effect with data.augment.enabled false: remove one of them", notice=True)
    for key, field in AugmentSettings.model_fields.items()
    if key != "enabled"
)  # fmt: skip


def rgb(name: str) -> tuple[int, int, int]:
    """The colour of a name or #rrggbb, each part 0 to 255.

    Raises ValueError: there is no such colour.
    """
    from PIL import ImageColor

    try:
        red, green, blue = ImageColor.getrgb(name)[:3]
    except ValueError as error:
        raise ValueError(f"invalid color {name!r}: use a name such as white, or #rrggbb") from error
    return red, green, blue
