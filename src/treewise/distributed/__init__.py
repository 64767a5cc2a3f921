"""Many processes: ranks, sharding, placement of trees, lockstep."""
