"""Stores of precomputed features: rows computed once enter, and are read at random without loading the store.

`manifest` has the files and the encoding of features as stored rows, `writer` makes a store, `store` reads one, local
or remote, as memory-mapped chunks. `search` reads the features of a part in order, and `tables` exports them.
"""
