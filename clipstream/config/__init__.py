"""Settings: the tree of sections, its construction from YAML files and flags, help, and the entry point of verbs.

A command line and YAML files enter; a frozen `Settings` leaves, or a `SettingsError` with the place of each mistake.
The class of a section is defined beside the code that uses it (`data.settings`, `training.settings`, …) and has the
rules about that section; `validate` has the rules that span sections. `command_line` starts and ends a verb. Nothing
here imports torch.

pydantic validates; pydantic-settings does not read the sources: it accepts no flag for a key of a named section
(`--data.sources.NAME.shards`) or of a plug-in, keeps no file and line of a value, and takes half a second to import.
"""
