"""Kernels of attention that no GPU has run yet."""
