"""ms-swift on trees: `plugin.py`, by its path. ms-swift puts the folder of a plugin before all packages."""
