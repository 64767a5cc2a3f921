"""One self-contained page and its JSON twin."""
