"""The bytes of a sample become pixels, token ids and labels.

A raw sample (member name -> bytes) enters; a uint8 image of the model's size, and the ids of its caption or its
label, leave. A sample that cannot be used leaves as `Dropped` with its reason.
"""
