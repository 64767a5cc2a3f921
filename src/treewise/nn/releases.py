"""Which release of another library is installed."""

from importlib.metadata import PackageNotFoundError, version


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
