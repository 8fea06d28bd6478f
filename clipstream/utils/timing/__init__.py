"""Where the time of a step goes: its parts, their times, profiles of some steps, and the use of the machine.

The parts of a training step, by their names in metrics.jsonl; this module imports no torch:

data            the loader's next batch, until every rank has one
copy            the batch is copied to the device, as far as the step waits for it
image_forward   the image tower, in all its forward passes but those of activation checkpointing
text_forward    the text tower, likewise
forward         of a forward pass, what is in neither tower; all of it where both are compiled as one
loss            the loss and the gradients of the features, with its communication
backward        the backward passes of the towers
communication   gradients are complete on this rank, and their sums over the ranks are not (DDP)
optimizer       gradient norm, clipping, update, averaged weights
other           the rest of the host's work, without training lines, evaluations and checkpoints
"""

from __future__ import annotations

DATA, COPY = "data", "copy"
IMAGE_FORWARD, TEXT_FORWARD, FORWARD = "image_forward", "text_forward", "forward"
LOSS, BACKWARD, COMMUNICATION, OPTIMIZER, OTHER = "loss", "backward", "communication", "optimizer", "other"
PARTS = (DATA, COPY, IMAGE_FORWARD, TEXT_FORWARD, FORWARD, LOSS, BACKWARD, COMMUNICATION, OPTIMIZER, OTHER)
