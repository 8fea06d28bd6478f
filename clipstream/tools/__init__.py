"""What the verbs other than `train` do, and what `train` takes over from an earlier process.

Command lines and resolved settings enter; printed tables, files and exit codes leave.
"""
