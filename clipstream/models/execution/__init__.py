"""How the towers are run: texts in buckets by length, and the repeated blocks that compilation, recomputation and
sharding take one by one.

Towers and settings enter; towers that give the same features for less time or memory leave.
"""
