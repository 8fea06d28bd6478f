"""Workers fill shared batch buffers, and the loader hands the batches to the training loop in order.

References to samples enter; a rank's batches leave, on its device. A `sampler` walks a lane's shards. A `pipeline`
makes pixels and ids of samples, or `features` gathers stored rows in their place; both run in `workers`. The `loader`
owns the workers; `recipe` has the buffers. `health` counts used and dropped samples, `stage_timing` the time of stages.
"""
