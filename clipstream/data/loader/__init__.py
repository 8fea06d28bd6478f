"""Worker processes fill shared batch buffers, and the loader hands the batches to the training loop in order.

References to samples enter; a rank's batches leave, on its device. A `sampler` walks a lane's shards, a `pipeline`
makes pixels and ids of its samples in a `worker`, and the `loader` owns the workers and the `shared_buffers`. `health`
counts used and dropped samples, `stage_timing` the time of each stage, and `sample_debug` prints single samples.
"""
