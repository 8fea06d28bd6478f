"""A URL becomes a complete, uncompressed local file.

A shard's URL enters; the path of a local file, or a `ShardError` with its reason, leaves. `shard_cache` keeps
files within a limit; `download` makes them: it picks the transfer for a URL, and unpacks gzip and zstd; `backends`
reaches object stores and runs commands; `tar` reads what files hold.
"""
