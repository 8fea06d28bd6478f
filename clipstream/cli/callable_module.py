"""Modules that can be called: `clipstream.train` is the module of a verb and the function of the same name.

`python -m clipstream.train` needs the module, and importing it anywhere makes it the package's attribute; a function
that replaced it there would depend on the order of imports.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any


class CallableModule(ModuleType):
    """A module that passes calls to its function of the same name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    @property
    def _function(self) -> Any:
        return vars(self)[self.__name__.rpartition(".")[2]]

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function)


def make_callable(name: str) -> None:
    """Make the module `name` callable, with its function's documentation after its own; called as it is imported."""
    module = sys.modules[name]
    if name == "__main__":
        return
    module.__class__ = CallableModule
    function: Any = vars(module)[name.rpartition(".")[2]]
    module.__doc__ = (
        f"{inspect.cleandoc(function.__doc__ or '')}\n\nThis is also the module of the verb:\n{module.__doc__}"
    )
