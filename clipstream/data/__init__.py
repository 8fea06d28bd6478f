"""A URL becomes a Batch; this room knows no model."""
