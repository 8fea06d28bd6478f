"""What is made of the features in a complete store: neighbours, near-duplicates, clusters, scores, exported files.

A `FeatureStore` enters, read in order and in blocks (`rows`). Arrays, tables and files leave. `search` and `clusters`
know no store; they take any rows that can be read in blocks.
"""
