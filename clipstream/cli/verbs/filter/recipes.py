"""The baselines of DataComp (arXiv:2304.14108) as rules, from `baselines/apply_filter.py` of mlfoundations/datacomp.

With DataComp's metadata by `--join`, captions and sizes are its columns `text`, `original_width` and `original_height`.
Without, captions are those of the source, which have no spaces around them, and sizes those of the original file, where
img2dataset has kept them, or of the image. Fields that are not in a sample come by `--join` or `--scores`:

- `clip_l14_similarity_score`, `clip_b32_similarity_score`: columns of DataComp's metadata.
- `language`: DataComp uses fastText's lid.176.bin, which `--language-model` reads.
- `language_cld3`: the code that gcld3 finds. `wordnet_entity`: whether WordNet's first sense of a word of the caption
  is in ImageNet-21k. `near_imagenet`: whether the nearest of DataComp's centroids is that of an image of ImageNet.
"""

from __future__ import annotations

_SIDES = ", ".join(f"coalesce(original_{side}, json.original_{side}, {side})" for side in ("width", "height"))
_TEXT = "coalesce(text, caption)"
_IMAGE = rf'language == "en" and count({_TEXT}, "\n|[^ \n\r\t\v\f\x00]+") > 1 and chars({_TEXT}) > 5 and near_imagenet'
OPTIONAL = (
    "text",
    "original_width",
    "original_height",
    "json.original_width",
    "json.original_height",
)  # fields that need not be there
RECIPES = {
    "basic": f'language == "en" and words({_TEXT}) > 2 and chars({_TEXT}) > 5 '
    f"and min({_SIDES}) >= 200 and max({_SIDES}) / min({_SIDES}) <= 3.0",
    "laion-2b": 'language_cld3 == "en" and clip_b32_similarity_score >= 0.28',
    "text-based": 'language == "en" and wordnet_entity',
    "image-based": _IMAGE,
    "clip-l14-30": "rank(clip_l14_similarity_score) <= 0.3 * samples()",
    "clip-b32-30": "rank(clip_b32_similarity_score) <= 0.3 * samples()",
    "datacomp-1b": f"{_IMAGE} and rank(clip_l14_similarity_score) <= 0.3 * samples()",
}
