"""A transformers model on a tree: attention, recurrent layers, head, router losses. Does not import `data`."""
