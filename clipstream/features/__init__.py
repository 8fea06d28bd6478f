"""Stores of precomputed features: rows computed once enter, and are read at random without loading the store.

`codec` encodes features as stored rows, `chunks` is the file format, `manifest` describes a store, `writer` makes one,
`store` reads one, local or remote, as memory-mapped chunks.
"""
