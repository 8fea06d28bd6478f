"""Contrastive losses over the global batch and losses of distillation, exact for any number of ranks.

Features of a rank's batch enter; the loss and its gradients leave. `tiled` and `affinity` compute them without the
whole matrix of logits, `ring` passes rows from rank to rank, and `reference` is the same in a few lines, for tests.
"""
