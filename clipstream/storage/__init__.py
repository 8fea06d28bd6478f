"""A URL becomes a complete, uncompressed local file.

A shard's URL enters; the path of a local file, or a `ShardError` with its reason, leaves. `schemes` picks the
transfer for a URL and unpacks gzip and zstd; `download` is that of HTTP and object stores; `shard_cache` keeps files
within a limit; `tar` reads what they hold.
"""
