"""What the verbs other than train do."""
