"""Many ranks: who trains which trajectories, and how all of them take part in every collective operation."""
