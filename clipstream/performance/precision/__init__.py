"""The precision of one step, operator by operator: the operators of a step enter; casts, operations wider than the
run's precision, gradients' distance to the limits of 16-bit numbers, and findings leave.
"""
