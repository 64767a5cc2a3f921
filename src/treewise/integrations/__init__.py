"""Trees inside of other trainers: TRL, verl."""
