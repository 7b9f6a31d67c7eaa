"""The version of taskd, as installed; imported at the first use of `taskd.__version__`."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("pgtaskd")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+unknown"
