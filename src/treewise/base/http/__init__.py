"""What every server of treewise has in common: who may come in, bodies within limits, and how it listens."""
