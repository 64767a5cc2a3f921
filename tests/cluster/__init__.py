"""Jobs of `treewise launch` on machines that are network namespaces: `make cluster`."""
