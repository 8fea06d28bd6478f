"""Stores of precomputed features: rows computed once enter, and are read at random without loading the store.

`manifest` has the files and the encoding of features as stored rows, `writer` makes a store, `store` reads one, local
or remote, as memory-mapped chunks, and `stored_rows` the features of a part in order. Training reads them by
`clipstream.data.loader.features`.
"""

CHUNK_ROWS = 8192  # default samples of a chunk
ROWS_MULTIPLE = 4096  # of chunk_rows: rows of any width then fill whole pages
