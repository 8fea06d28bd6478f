"""A Batch becomes features and a loss; this room knows no data source."""
