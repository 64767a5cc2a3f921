"""The seams of other trainers: TRL, verl."""
