"""The training step and the loop around it.

A loader, towers and settings enter; updated weights and training lines leave. `step` computes exact gradients of the
global batch and updates the weights; `trainer` runs steps, evaluations and saves in turn.
"""
