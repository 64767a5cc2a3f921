"""Files to raw records: reading, checking and printing."""
