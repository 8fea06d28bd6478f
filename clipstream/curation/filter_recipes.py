"""The baselines of DataComp (arXiv:2304.14108) in SQL, from `baselines/apply_filter.py` of mlfoundations/datacomp.

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
# Words as Python's split() separates them, and tokens as fastText's tokenize().
_WORDS = rf"len(regexp_extract_all({_TEXT}, '[^\s\p{{Z}}\x0b\x1c-\x1f\x85]+'))"
_TOKENS = rf"len(regexp_extract_all({_TEXT}, '\n|[^ \n\r\t\v\f\x00]+'))"
_ENGLISH = ("language = 'en'", f"length({_TEXT}) > 5")
_IMAGE = (*_ENGLISH, f"{_TOKENS} > 1", "near_imagenet")


def _top(field: str) -> str:
    return f"{field} IS NOT NULL AND rank() OVER (ORDER BY {field} DESC NULLS LAST) - 1 <= 0.3 * count(*) OVER ()"


OPTIONAL = (
    "text",
    "original_width",
    "original_height",
    "json.original_width",
    "json.original_height",
)  # fields that need not be there
RECIPES = {
    "basic": (*_ENGLISH, f"{_WORDS} > 2", f"least({_SIDES}) >= 200", f"greatest({_SIDES}) / least({_SIDES}) <= 3.0"),
    "laion-2b": ("language_cld3 = 'en'", "clip_b32_similarity_score >= 0.28"),
    "text-based": ("language = 'en'", "wordnet_entity"),
    "image-based": _IMAGE,
    "clip-l14-30": (_top("clip_l14_similarity_score"),),
    "clip-b32-30": (_top("clip_b32_similarity_score"),),
    "datacomp-1b": (*_IMAGE, _top("clip_l14_similarity_score")),
}
