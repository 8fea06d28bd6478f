"""Evaluators that register themselves and import no torch; the others are in `clipstream.evals`."""
