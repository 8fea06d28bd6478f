"""Which sample comes when: pure arithmetic on the seed, the settings and the number of shards or samples.

A position (lane, source, group, window) enters; the shards to open and the samples of a window leave. `rng` has the
hashes and permutations; `lanes` cuts the global batch into lanes, chooses the source of each sample, and has the
position as checkpoints keep it; `windows` orders the samples of one source, and `epochs` makes epochs exact.
"""
