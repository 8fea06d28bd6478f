"""`clipstream stage`: what is copied, one shard's copy, the processes that copy, the progress bar."""
