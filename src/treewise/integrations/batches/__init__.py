"""Batches of other trainers as forests: what the integrations of TRL and verl share."""
