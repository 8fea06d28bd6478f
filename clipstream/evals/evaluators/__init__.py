"""The evaluators that come with clipstream, one file each."""
