"""Evaluators of one file each, which register themselves; the torch behind the others is in the modules above."""
