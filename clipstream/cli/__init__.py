"""The command line: the verbs, their help, and their start and end.

An argument list enters; an exit code, and errors as one line each on stderr, leave. The verbs' work is done in `tools`
and `train`; flags and files of settings are read in `config`.
"""
