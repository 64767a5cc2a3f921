"""The `treewise` command. The only place that parses arguments; everything it does is a call of the library."""
