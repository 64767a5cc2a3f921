"""Tables: Parquet files, Arrow files, data sets of `datasets` by object, folder or name, and data frames."""

from treewise.data.tables.arrow_rows import parquet_records, row_values
from treewise.data.tables.opening import opened

__all__ = ["opened", "parquet_records", "row_values"]
