"""`python -m resile.collectives`: serve a rendezvous until the process is ended."""

import argparse
import os
import sys
from contextlib import suppress

from resile_shared.errors import ResileError

from .rendezvous import serve

TOKEN = "RESILE_COLLECTIVES_TOKEN"


def main() -> int:
    """Serve, print the address, and wait."""
    parser = argparse.ArgumentParser(prog="python -m resile.collectives", description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:29400", metavar="HOST:PORT", help="port 0: a free one")
    parser.add_argument("--detection-seconds", type=float, default=3.0, help="a member so long silent is removed")
    args = parser.parse_args()
    try:
        rendezvous = serve(args.listen, detection_seconds=args.detection_seconds, token=os.environ.get(TOKEN, ""))
    except ResileError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    print(f"rendezvous at {rendezvous.address}", flush=True)
    with suppress(KeyboardInterrupt), rendezvous:
        rendezvous.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
