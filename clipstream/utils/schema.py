"""Content of files that are read back, checked against the types of a dataclass or a pydantic model.

Values of JSON or of a pickle enter; an object of the class leaves, or a `ValueError` that names the first wrong key.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from clipstream.utils.escape import printable

T = TypeVar("T")
MOST = 10**15  # steps, samples, bytes
Count = Annotated[int, Field(ge=0, le=MOST)]
SHOWN = 60  # characters of a wrong value
OBJECTS = ConfigDict(arbitrary_types_allowed=True)  # of a class with tensors


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def checked(kind: type[T], values: Any) -> T:
    """The values as `kind`; bytes and text are JSON.

    Raises ValueError: they are not.
    """
    try:
        adapter: Any = _adapter(kind)  # type: ignore[arg-type]
        found: T = (adapter.validate_json if isinstance(values, str | bytes) else adapter.validate_python)(values)
        return found
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise ValueError(f"{key or 'content'}: {first['msg']}, not {printable(repr(first['input']), SHOWN)}") from error
