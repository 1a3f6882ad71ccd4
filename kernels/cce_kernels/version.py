"""The version of the installed distribution, for every package in it. Imports no framework."""


def installed() -> str:
    """The version, such as "0.1.0"; "0+unknown" in a checkout that is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # imported here, as most programs never need it

    try:
        return version("cce-jax")
    except PackageNotFoundError:
        return "0+unknown"
