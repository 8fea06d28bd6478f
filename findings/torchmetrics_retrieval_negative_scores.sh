#!/usr/bin/env bash
# torchmetrics' retrieval metrics take a relevant document with a score of 0 or less for an irrelevant one.
#
# Versions: torchmetrics 1.9.0, torch 2.15.0. Cosines, SigLIP logits (their bias is about -10) and negative distances are usual
# scores of retrieval, and a rank does not depend on where their zero is. But recall, precision, average precision and reciprocal
# rank (functional/retrieval/recall.py, precision.py, average_precision.py, reciprocal_rank.py) first set `target` to 0 where
# preds <= 0. Recall, precision and reciprocal rank fall, down to 0 for logits, at any top_k. Average precision may RISE: it
# is the mean over the relevant documents that are left, so those that were ranked low drop out of the denominator. Hit rate,
# nDCG and R-precision do no such thing and disagree. `preds` is called a probability; nothing is checked, nothing warns.
# Give scores less their least, plus 1, or their sigmoid where that is precise enough to keep them apart.
#
# Seen 2026-11-29 (100 captions, 200 images, 5 relevant ones each that match weakly; MAP, MRR, recall and hit rate at 100, nDCG)
#   cosines: 0.155, 0.312, 0.780, 1.000, 0.410; cosines + 1: 0.134, 0.312, 0.792, 1.000, 0.410
#   SigLIP logits: 0.000, 0.000, 0.000, 1.000, 0.410; their sigmoid: 0.134, 0.312, 0.792, 1.000, 0.410
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy==2.4.6 torch==2.15.0 torchmetrics==1.9.0
cat > "$work/scores.py" <<'EOT'
import torch
from torchmetrics.retrieval import RetrievalHitRate, RetrievalMAP, RetrievalMRR, RetrievalNormalizedDCG, RetrievalRecall

torch.manual_seed(0)
captions, images = torch.randn(100, 1, 64), torch.randn(100, 200, 64)
images[:, :5] += 0.1 * captions
target = torch.zeros(100, 200, dtype=torch.bool)
target[:, :5] = True
cosines = torch.cosine_similarity(captions, images, dim=2).double()
logits = 10 * cosines - 10
indexes = torch.arange(100)[:, None].expand(100, 200)
kinds = {"cosines": cosines, "cosines + 1": cosines + 1, "SigLIP logits": logits, "their sigmoid": torch.sigmoid(logits)}
found = {}
for kind, scores in kinds.items():
    metrics = (
        RetrievalMAP(), RetrievalMRR(), RetrievalRecall(top_k=100), RetrievalHitRate(top_k=100), RetrievalNormalizedDCG()
    )
    values = found[kind] = [metric(scores, target, indexes=indexes).item() for metric in metrics]
    print(f"{kind}: {', '.join(f'{value:.3f}' for value in values)}", flush=True)

order = cosines.argsort(dim=1, descending=True)
relevant = target.gather(1, order).double()
precision = relevant.cumsum(dim=1) / torch.arange(1, 201)
truth = [
    ((precision * relevant).sum(dim=1) / 5).mean().item(),
    (1 / (relevant.argmax(dim=1) + 1)).mean().item(),
    (relevant[:, :100].sum(dim=1) / 5).mean().item(),
    (relevant[:, :100].sum(dim=1) > 0).double().mean().item(),
]
for kind in ("cosines + 1", "their sigmoid"):
    assert all(abs(value - true) < 1e-5 for value, true in zip(found[kind], truth)), (kind, truth)
average, reciprocal, recall, hits, gain = found["cosines"]
assert average > truth[0] + 0.01 and recall < truth[2] - 0.01 and abs(hits - truth[3]) < 1e-5
assert found["SigLIP logits"][:3] == [0, 0, 0] and all(abs(row[4] - gain) < 1e-5 for row in found.values())
EOT
"$work/venv/bin/python" -W ignore "$work/scores.py"
