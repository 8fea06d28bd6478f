"""Owns the change of a training picture's colours: jitter of brightness, contrast, saturation and hue, and greys.

The factors are torchvision's ColorJitter's; they are drawn from the sample's own numbers, so a run repeats them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageEnhance

from clipstream.data.settings import AugmentSettings

if TYPE_CHECKING:
    from clipstream.data.order import Draws

_ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


class ColourJitter:
    """Callable: an RGB picture with other colours, or the same one, as `draws` say."""

    def __init__(self, settings: AugmentSettings) -> None:
        self._strengths = settings.color_jitter or (0.0, 0.0, 0.0, 0.0)
        self._share = settings.color_jitter_prob if settings.color_jitter else 0.0
        self._grey = settings.gray_scale_prob

    @property
    def does_nothing(self) -> bool:
        """Whether no picture is ever changed; then nothing is drawn."""
        return self._share == 0 and self._grey == 0

    def __call__(self, picture: Image.Image, draws: Draws) -> Image.Image:
        """The picture, in RGB."""
        if self._share > 0 and draws.uniform() < self._share:
            picture = self._jittered(picture, draws)
        if self._grey > 0 and draws.uniform() < self._grey:
            picture = picture.convert("L").convert("RGB")
        return picture

    def _jittered(self, picture: Image.Image, draws: Draws) -> Image.Image:
        """The four changes in a drawn order, as they do not commute."""
        order = [0, 1, 2, 3]
        for place in (3, 2, 1):
            other = draws.integer(place + 1)
            order[place], order[other] = order[other], order[place]
        for kind in order:
            strength = self._strengths[kind]
            if strength == 0:
                continue
            if kind == 3:
                picture = _turned(picture, draws.uniform(-strength, strength))
            else:
                factor = draws.uniform(max(0.0, 1 - strength), 1 + strength)
                picture = _ENHANCERS[kind](picture).enhance(factor)
        return picture


def _turned(picture: Image.Image, turn: float) -> Image.Image:
    """The picture with its hues turned by `turn` of the circle, -0.5 to 0.5."""
    hue, saturation, value = picture.convert("HSV").split()
    turned = np.asarray(hue) + np.uint8(int(turn * 255) % 256)  # uint8: it goes round
    return Image.merge("HSV", (Image.fromarray(turned), saturation, value)).convert("RGB")
