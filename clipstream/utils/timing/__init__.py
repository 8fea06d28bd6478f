"""Where the time of a step goes: its parts, their times, profiles of some steps, and the use of the machine."""
