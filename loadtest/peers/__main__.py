"""Races servers; those that are not installed are left out (see `loadtest.peers.install`)."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from loadtest.peers.measuring import Measurement
from loadtest.peers.models import MODELS, prepare_model
from loadtest.peers.race import Race, say
from loadtest.peers.report import report
from loadtest.peers.servers import PEERS, Peer, named, variant
from loadtest.peers.workload import DOCUMENT, SHAPES, STARTUP, cases_of, limits_for


def words(text: str) -> list[str]:
    """The parts of a list with commas."""
    return text.split(",")


def counts(text: str) -> list[int]:
    """The parts of a list of numbers with commas."""
    return [int(word) for word in words(text)]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    named_shapes = {name for shapes in SHAPES.values() for name in shapes} - {DOCUMENT}
    shapes = ", ".join([STARTUP, *sorted(named_shapes), f"{DOCUMENT} (tiny only)"])
    parser = argparse.ArgumentParser(prog="python -m loadtest.peers", description=__doc__)
    parser.add_argument("--peers", type=words, default=list(PEERS), help=f"of {', '.join(PEERS)}, variants")
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="'NAME=SERVER VARIABLE=VALUE… FLAG…'",
        help="a server with further settings, under a name of its own",
    )
    parser.add_argument("--workload", type=words, default=["tiny"], help=f"of {', '.join(MODELS)}")
    parser.add_argument(
        "--shapes", type=words, default=["decode"], help=f"of {shapes}; startup is always told"
    )
    parser.add_argument("--concurrency", type=counts, default=[64], help="streams at a time, such as 1,8,32")
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("--threads", default=os.cpu_count(), type=int, help="of the model")
    parser.add_argument("--no-rehearsal", action="store_true", help="count each server's first start too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write each measurement there, a line each")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep there what the servers print")
    return parser.parse_args(arguments)


def choose_peers(names: Sequence[str], variants: Sequence[str]) -> tuple[Peer, ...]:
    """The servers of these names that are installed; says which are not.

    Raises:
        ValueError: a name or a variant means nothing.
    """
    known = {**PEERS, **{each.name: each for each in map(variant, variants)}}
    chosen = []
    for name in names:
        peer = named(name, known)
        if missing := peer.missing():
            say(f"{name}: skipped: {missing}")
        else:
            chosen.append(peer)
    return tuple(chosen)


def races(options: argparse.Namespace, logs: Path) -> Iterator[Race]:
    """A race for each model.

    Raises:
        ValueError: a name on the command line means nothing.
    """
    peers = choose_peers(options.peers, options.variant)
    for name in options.workload:
        if name not in MODELS:
            raise ValueError(f"no workload is called {name}; there are {', '.join(MODELS)}")
        cases = cases_of(name, options.shapes, options.concurrency)
        limits = limits_for(cases, options.threads)
        yield Race(peers, prepare_model(name), tuple(cases), limits, options.rounds, logs)


def main(arguments: Sequence[str]) -> int:
    """Runs the race; 1 if any answer was wrong, 2 if it cannot be run."""
    options = parse(arguments)
    measurements: list[Measurement] = []
    with ExitStack() as stack:
        logs = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs.mkdir(parents=True, exist_ok=True)
        # Line by line, so that a race that is broken off leaves what it had.
        results = stack.enter_context(options.json.open("w")) if options.json else None
        try:
            for race in races(options, logs):
                for measurement in race.run(rehearse=not options.no_rehearsal):
                    measurements.append(measurement)
                    if results is not None:
                        print(measurement.to_line(), file=results, flush=True)
        except ValueError as error:
            say(f"error: {error}")
            return 2
    print(report(measurements))
    return 1 if any(measurement.problems for measurement in measurements) else 0


def _end(_number: int, _frame: FrameType | None) -> None:
    # As an exception, so that the server that runs is stopped on the way out.
    raise SystemExit(130)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    sys.exit(main(sys.argv[1:]))
