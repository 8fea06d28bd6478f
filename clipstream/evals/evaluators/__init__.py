"""The evaluators that come with clipstream; the mean of others is in `runner`."""
