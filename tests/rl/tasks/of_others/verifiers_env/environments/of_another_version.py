"""Imports what verifiers 0.4 does not have."""

import verifiers.utils  # noqa: F401
