#!/usr/bin/env bash
# scikit-learn's LogisticRegression stops far from the optimum on features of length 1 and many classes, without a warning.
#
# Version: scikit-learn 1.9.1. `tol` (1e-4) is passed to L-BFGS as a bound on the largest entry of the gradient of the mean loss
# (linear_model/_logistic.py: "gtol"). Such an entry is at most about a feature's size, 1/sqrt(width), over the number of
# classes, so that the bound is reached the earlier the more classes there are. n_iter_ stays far below max_iter, so there is no
# ConvergenceWarning. In the sweep of a linear probe, accuracy falls at large values of C, which looks like overfitting; those
# probes were not fitted, and the sweep chooses another C. With tol=1e-6 the same C is the best one.
#
# Seen 2026-11-29 (100 classes, 20 samples each, 128 numbers of length 1; accuracy on other samples):
#   tol=1e-4: C = 100: 0.90 after 65 steps; C = 10,000: 0.52 after 25 steps; no warning
#   tol=1e-6: C = 10,000: 0.96 after 121 steps
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet scikit-learn==1.9.1 numpy==2.4.1 scipy==1.17.1
OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 "$work/venv/bin/python" - <<'EOF'
import warnings

import numpy as np
from sklearn.linear_model import LogisticRegression

warnings.simplefilter("error")
rng = np.random.default_rng(0)
classes, width = 100, 128
spread = np.exp(-4 * np.linspace(0, 1, width))
spread /= np.sqrt(np.mean(spread**2))
centers, common = rng.normal(size=(classes, width)), rng.normal(size=width)


def draw(per_class):
    """Features in a cone around a common mean, as of CLIP, and their classes."""
    labels = np.repeat(np.arange(classes), per_class)
    rows = 2 * common + centers[labels] / 2 + 2 * spread * rng.normal(size=(len(labels), width))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True), labels


(x, y), (test_x, test_y) = draw(20), draw(5)
found = {}
for tol, c in ((1e-4, 100), (1e-4, 10_000), (1e-6, 10_000)):
    probe = LogisticRegression(C=c, tol=tol, max_iter=1000).fit(x, y)
    found[tol, c] = probe.score(test_x, test_y)
    print(f"tol={tol:.0e}: C = {c:,}: {found[tol, c]:.2f} after {probe.n_iter_[0]} steps")
assert found[1e-4, 10_000] < found[1e-4, 100] - 0.2 and found[1e-6, 10_000] > found[1e-4, 100]
EOF
