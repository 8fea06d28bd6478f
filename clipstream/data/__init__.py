"""Shards become batches: a specification of sources enters, `Batch` objects leave.

`sources` lists and opens shards, `clipstream.storage` brings remote ones to local files, `order` decides which sample
comes when, `decode` makes pixels and token ids of bytes, and `loader` runs the workers that fill batches. `pipeline`
connects them for training, `sequential_loader` for evaluations and features. Nothing here knows a model.
"""
