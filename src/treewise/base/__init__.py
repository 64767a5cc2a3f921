"""What every layer may use: shapes in annotations, optional features, progress, files of our own."""
