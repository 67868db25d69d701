"""The command `paged-backend`."""

from __future__ import annotations

import sys

from paged_backend import MissingExtraError

INTERRUPTED = 130
"""The exit code."""


def main() -> None:
    """The console script; without the extra it says how to install it."""
    try:
        from paged_backend.cli.app import app
    except ImportError as error:
        if error.name is None or error.name.startswith("paged_backend"):
            raise
        sys.exit(f"error: {MissingExtraError('the command paged-backend', 'server')}")
    except KeyboardInterrupt:  # the imports take seconds
        sys.exit(INTERRUPTED)
    app()
