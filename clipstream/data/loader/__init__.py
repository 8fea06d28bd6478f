"""Worker processes fill shared batch buffers, and the loader hands the batches to the training loop in order.

References to samples enter; a rank's batches leave, on its device. A `sampler` walks a lane's shards, a `pipeline`
makes pixels and ids of its samples in one of the `workers` and prints single samples (`--data.trace`), and the `loader`
owns the workers and the `batch_buffers`. `health` counts used and dropped samples, `stage_timing` the time of stages.
"""
