"""Checkpoints: their content, where they are stored, and which of them are kept.

A run's state enters; folders of safetensors files leave, written in the background and copied to a remote folder if one
is set. A checkpoint is complete, or does not count. `store` also keeps two processes from training in one folder.
"""
