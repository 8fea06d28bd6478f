"""Optimiser, schedule, step, checkpoints and the loop; evaluators and sinks reach it as Protocols."""
