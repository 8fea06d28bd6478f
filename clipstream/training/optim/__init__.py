"""Optimizers and learning-rate schedules.

Settings and towers enter; a torch optimizer and the learning rate as a function of the step leave. Built-in ones are
entries of two tables in `registry`; a user's own is named `module:Name`. Importing this package does not import torch.
"""

from clipstream.training.optim.groups import parameter_groups
from clipstream.training.optim.registry import Optimizer, Schedule, build_optimizer, build_schedule
from clipstream.training.optim.settings import OptimSettings, ScheduleSettings

__all__ = [
    "OptimSettings",
    "Optimizer",
    "Schedule",
    "ScheduleSettings",
    "build_optimizer",
    "build_schedule",
    "parameter_groups",
]
