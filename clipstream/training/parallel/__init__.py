"""Towers on several ranks: DDP, FSDP2 and batch norm over the global batch."""
