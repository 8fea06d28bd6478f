"""Workers fill shared batch buffers, and the loader hands the batches to the training loop in order.

References to samples enter; a rank's batches leave, on its device. A `sampler` walks a lane's shards.
`clipstream.data.pipeline` makes pixels and ids of samples, or `features` gathers rows of `stored` data in their place;
both run in the workers, which the `loader` owns; `reading_recipe` says how the samples of a source are read,
`batch_buffers` has their memory and the copy to the device. `health` counts used and dropped samples, `stage_timing`
the time of stages.
"""
