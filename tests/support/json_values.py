"""Any JSON value, and any place of a JSON value, for tests of files that are read back."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from([-1, 1, 2, 10**30, 1 << 31, "", "..", "mapped", "tar", "int8", "view", "caption", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all values in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, one in items for found in places(one, (*path, key)))]


def changed(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    tree = tree.copy()
    tree[path[0]] = changed(tree[path[0]], path[1:], value)
    return tree
