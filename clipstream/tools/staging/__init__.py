"""The parts of `clipstream stage`: what is to be copied, one shard's copy, the processes that make them, the bar."""
