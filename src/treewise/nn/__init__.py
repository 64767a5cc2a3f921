"""A transformers model on a tree: attention, recurrent layers, head, router losses. Knows nothing of data files."""
