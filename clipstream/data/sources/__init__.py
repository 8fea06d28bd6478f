"""Sources: the setting `shards` becomes shards that can be opened.

Settings enter; names of shards, samples per shard and open shards leave, in the forms of `protocol`. Each type of
source (tars, tables, folders, CLIP_benchmark, toy and synthetic data, or a user's own) is an entry of `registry`, whose
`Source` combines the types of one setting. Only this package knows which type a shard has.
"""
