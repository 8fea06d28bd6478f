"""`clipstream stage`: what is copied, one shard and its pictures, the processes that copy, the progress bar."""
