"""The command line of open_clip's trainer, and the other short flags: translated to settings before they are parsed.

Short flags with their texts enter; settings, as (flag, path, value), leave, and a notice for each flag without effect.
`flags` is the table of the flags; `translate` is what several mean together. Imports no torch.
"""
