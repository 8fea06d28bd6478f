"""Processes and ranks: which rank a process is, how ranks meet, and how all of them end.

torchrun's or Slurm's environment variables enter; a `World` leaves. `launch` starts and ends a process that works on
a model, and passes the first error of any rank to all others; `signals` records requests to stop, and `run_record`
describes how a run began and ended.
"""
