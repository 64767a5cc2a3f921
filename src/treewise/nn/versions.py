"""Which releases are installed, and which of torch the tests of a release run with."""

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

# What the tests of a release run with; pyproject.toml admits later ones, too.
TESTED_TORCH = ">=2.11,<2.14"


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def untested_torch(release: str) -> str | None:
    """Words on a release of torch (`2.15.0+cu130`) that no test has run with; None of a tested one."""
    if SpecifierSet(TESTED_TORCH, prereleases=True).contains(release.partition("+")[0]):
        return None
    return f"{release}: tests run with torch {TESTED_TORCH}"
