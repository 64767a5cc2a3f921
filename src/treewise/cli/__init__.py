"""The `treewise` command. Only this package parses arguments; everything it does is a call of the library."""
