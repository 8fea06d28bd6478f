"""One module a verb: `main(argv)` runs it and returns its exit code."""
