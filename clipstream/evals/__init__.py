"""Evaluators, and the runner that calls them during training and outside of it.

Towers and a data source enter; (name, value) pairs leave, the same for any number of ranks.
"""
