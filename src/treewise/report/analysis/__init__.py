"""Facts about data, plans and runs, as plain numbers."""
