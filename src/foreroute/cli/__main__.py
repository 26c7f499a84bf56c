"""`foreroute`, and `python -m foreroute.cli`: the command line, where its libraries are installed."""

import signal
import sys

from foreroute.errors import how_to_install

LIBRARIES = ("typer", "rich", "pydantic")
"""Libraries of the extra "cli"."""


def main() -> None:
    """Run the command line and exit; say what to install where a library of it is missing."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the imports without a traceback
    try:
        from foreroute.cli.main import main as run
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in LIBRARIES:
            raise
        sys.stderr.write(f"error: the command line needs {library}, which is not installed; {how_to_install('cli')}\n")
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
