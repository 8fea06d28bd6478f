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
from clipstream.evals.metrics import are_first, group_ranks
from clipstream.evals.settings import GroupsSettings, source_of
from clipstream.utils.logs import logger


class Groups:
    """Yields mAP, R@1 and R-precision of image_to_image and text_to_image with R@1 of a random answer, n (images),
    captions, groups and left_out (images whose group has no other one: answers, but no queries).

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
        world, images, texts, marks = context.world, [], [], [torch.zeros((0, 2), dtype=torch.int64)]
        for batch in context.batches(self.source, self.settings.batch_size, groups=field):
            assert batch.groups is not None and batch.checksums is not None, "an evaluation source gives both"
            images.append(context.encode_image(batch.images))
            texts.append(context.encode_text(batch.ids))
            marks.append(torch.stack([batch.groups, batch.checksums], dim=1))
        pairs, mine = context.stack("pair", images, texts), torch.cat(marks).to(world.device)
        every, own = world.gather_rows(mine), mine[:, 0].contiguous()
        once = are_first(torch.unique(every, dim=0, return_inverse=True)[1])
        answers, of_answers = world.gather_rows(pairs[0])[once].double(), every[once, 0]
        self._check(context, field, of_answers, samples=len(every))

        here = slice(start := sum(world.gather_objects(len(mine))[: world.rank]), start + len(mine))
        queries = (once.cumsum(dim=0) - 1)[here][once[here]]  # this rank's images among the answers
        names, group, sizes = torch.unique(of_answers, return_inverse=True, return_counts=True)
        queries = queries[sizes[group[queries]] > 1]
        ranks = group_ranks(answers[queries], of_answers[queries], answers, of_answers, queries)
        ways = {"image_to_image": (ranks, sizes[group[queries]] - 1, max(1, len(answers) - 1))}
        ranks = group_ranks(pairs[1], own, answers, of_answers)
        ways["text_to_image"] = ranks, sizes[torch.searchsorted(names, own)], len(answers)
        for way, (ranks, right, others) in ways.items():
            counts = ranks.new_tensor([len(right), int(right.sum()) / others])
            asked, chance, *totals = world.all_reduce_sum(torch.cat([counts, ranks.sum(dim=1)])).tolist()
            asked = asked or float("nan")
            for metric, total in zip(("mAP", "R@1", "R-precision"), totals, strict=True):
                yield f"{way}_{metric}", total / asked
            yield f"chance_{way}_R@1", chance / asked
        yield "n", len(answers)
        yield "captions", len(every)
        yield "groups", int((names & 1 == 0).sum())  # those of samples without the field are odd
        yield "left_out", int((sizes == 1).sum())

    def _check(self, context: EvalContext, field: str, labels: torch.Tensor, samples: int) -> None:
        """Warn if few of the images have a group. Raises SettingsError: none has one, or no two share one.

        In a dry run that has not seen all samples, others may have it: only a warning if none has.
        """
        if context.AT_MOST is None or samples < context.AT_MOST:
            alone, few = compare_groups("group", field, labels.cpu().numpy())
            if alone:
                raise SettingsError(alone)
        else:
            few = "" if (labels & 1 == 0).any() else f"group: none of the first {samples:,} samples has {field!r}"
        if few and context.world.is_main:
            logger.warning(f"evaluation {context.name!r}: {few}")
