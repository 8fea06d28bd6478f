"""Scripts that are written beside an exported model: how it is used, and what checks it without clipstream."""
