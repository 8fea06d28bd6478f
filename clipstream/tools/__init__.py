"""What the verbs other than `train` do, and what `train` takes over from an earlier process."""
