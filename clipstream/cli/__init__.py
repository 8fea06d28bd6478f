"""The command line: the console script, and the verbs, one module each in `verbs`.

An argument list enters; an exit code leaves. Settings, help, and the start and end of a verb are in `config`.
"""
