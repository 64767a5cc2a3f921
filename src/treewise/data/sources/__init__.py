"""Where records come from: files, folders, data sets of the hub or of `datasets`, data frames, and plain mappings."""

from treewise.data.sources.open import is_raw_data, open_sources
from treewise.data.sources.source import Source

__all__ = ["Source", "is_raw_data", "open_sources"]
