"""Curation, a wing that the core never imports: sample tables, checks, near-duplicates, packing, filters, searches.

Sources, stores of features and runs enter; lists of samples, scores, new shards and pages leave. A run
reads the lists by `data.sources.NAME.keep`, `drop` and `probability`, and the shards as any others.
"""
