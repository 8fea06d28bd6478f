"""Evaluators: each yields (name, value) for a model and a data source."""
