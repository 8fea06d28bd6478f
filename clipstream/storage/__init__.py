"""A URL becomes a complete, uncompressed local file.

A shard's URL enters; the path of a local file, or a `ShardError` with its reason, leaves. `downloader` picks the
transfer for a URL (`http`, `object_store`, `pipe`) and unpacks gzip and zstd; `shard_cache` keeps files within the
limit that `cache_eviction` enforces. How shards are listed or read is not known here.
"""
