"""Helpers that know nothing of training: files, processes, signals, text for terminals."""
