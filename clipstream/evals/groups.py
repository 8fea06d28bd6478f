"""Retrieval by groups: the images of a product or class, found by its other images and by its captions.

Images with equal files in a group are one image. Features of all images are on every rank, in float64; scores are made
for some queries at a time. For ties see `evals.metrics`; average precision is scikit-learn's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from clipstream.data.decode.labels import compare_groups
from clipstream.errors import SettingsError
from clipstream.evals.context import EvalContext
from clipstream.evals.metrics import first_places, group_ranks
from clipstream.evals.settings import GroupsSettings, source_of
from clipstream.utils.logs import logger


class Groups:
    """Yields mAP, R@1 and R-precision of image_to_image and text_to_image, n (images), captions, groups, left_out
    (images whose group has no other one: answers, but no queries) and R@1 of a random answer for both.

    A sample without a group is a group of its own, which `groups` does not count.

    Raises SettingsError: no data are set.
    """

    def __init__(self, settings: GroupsSettings) -> None:
        self.settings, self.source = settings, source_of(settings)

    def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
        """Evaluate. Collective.

        Raises:
            DataError: no usable pair.
            SettingsError: no field is set, no sample has it, or no two images share a group.
        """
        field = self.settings.group or getattr(context.loss, "groups_by", None)
        if field is None:
            raise SettingsError("group: missing: name the field with the group of a sample, as loss.positives.by")
        world, none = context.world, torch.zeros(0, dtype=torch.int64)
        images, texts, groups, files = [], [], [none], [none]
        for batch in context.batches(self.source, self.settings.batch_size, groups=field):
            assert batch.groups is not None and batch.checksums is not None, "an evaluation source gives both"
            images.append(context.encode_image(batch.images))
            texts.append(context.encode_text(batch.ids))
            groups.append(batch.groups.clone())
            files.append(batch.checksums.clone())
        pairs = context.stack("pair", images, texts)
        own, of_files = torch.cat(groups).to(world.device), torch.cat(files).to(world.device)
        every = world.gather_rows(own)
        _, few = compare_groups("group", field, every.cpu().numpy())
        if few and world.is_main and context.AT_MOST is None:
            logger.warning(f"evaluation {context.name!r}: {few}")

        # The first sample of each image, and where it is among the images.
        marks = torch.stack([every, world.gather_rows(of_files)], dim=1)
        distinct, same = torch.unique(marks, dim=0, return_inverse=True)
        once = torch.zeros_like(every, dtype=torch.bool)
        once[first_places(same, len(distinct))] = True
        answers, of_answers = world.gather_rows(pairs[0])[once].double(), every[once]
        start = sum(world.gather_objects(len(own))[: world.rank])
        mine = torch.arange(start, start + len(own), device=own.device)
        mine = (once.cumsum(dim=0) - 1)[mine[once[mine]]]

        names, group, sizes = torch.unique(of_answers, return_inverse=True, return_counts=True)
        queries, left_out = mine[sizes[group[mine]] > 1], int((sizes == 1).sum())
        if context.AT_MOST is None and left_out == len(answers):
            raise SettingsError(f"group: no two of the {left_out:,} images have the same {field!r}")
        of_images = group_ranks(answers[queries], of_answers[queries], answers, of_answers, queries)
        of_texts = group_ranks(pairs[1], own, answers, of_answers)
        chances = []
        right = (sizes[group[queries]] - 1, sizes[torch.searchsorted(names, own)])
        for way, found, count, others in zip(
            ("image_to_image", "text_to_image"),
            (of_images, of_texts),
            right,
            (max(1, len(answers) - 1), len(answers)),
            strict=True,
        ):
            sums = torch.cat([found.sum(dim=1), count.sum()[None] / others, count.new_full((1,), len(count))])
            *totals, chance, asked = world.all_reduce_sum(sums.double()).tolist()
            for metric, total in zip(("mAP", "R@1", "R-precision"), totals, strict=True):
                yield f"{way}_{metric}", total / asked if asked else float("nan")
            chances.append((f"chance_{way}_R@1", chance / asked if asked else float("nan")))
        yield "n", len(answers)
        yield "captions", len(every)
        yield "groups", int((names & 1 == 0).sum())  # those of samples without the field are odd
        yield "left_out", left_out
        yield from chances
