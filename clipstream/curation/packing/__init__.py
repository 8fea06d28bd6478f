"""Packing of samples into new shards: sources enter; tars of a chosen size and order, with side indexes, leave.

Two passes, each over shards that are worked off independently and renamed into place:

1. `ListShard` lists the usable samples of a shard of the sources: key, and in a tar where its members are.
2. `PackShard` writes a new shard. `Plan` says which samples it gets, as a function of the numbers of samples listed,
   the settings and the seed, so that any process can write any shard, and always the same bytes.

Samples are read where they are, in the order in which they are written: a process holds one sample. Remote and
compressed shards are downloaded by the first pass, and stay until the last shard is written. Imports no torch.
"""
