"""The Tinker API on trees: sequences that share a prefix, of one call or of several, are computed once."""
