"""Rounds in which every server takes its turn: A B C A B C …"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loadtest.peers.measuring import Measurement, measure, measure_startup
from loadtest.peers.models import ServedModel
from loadtest.peers.prompts import PromptMaker
from loadtest.peers.running import RunningServer, ServerFailed
from loadtest.peers.servers import Peer
from loadtest.peers.workload import Case, Limits


@dataclass(frozen=True, slots=True)
class Race:
    """Who runs what.

    Attributes:
        peers: in the order in which they take their turns.
        model: what all of them serve.
        cases: what each is put through in a turn.
        limits: what each gets to work with.
        rounds: how often.
        logs: folder for what the servers print.
    """

    peers: tuple[Peer, ...]
    model: ServedModel
    cases: tuple[Case, ...]
    limits: Limits
    rounds: int
    logs: Path

    def run(self, *, rehearse: bool) -> Iterator[Measurement]:
        """All rounds, each measurement as it is made. A server that fails takes no further part.

        Args:
            rehearse: start each server once before, so that files are in memory and compilers' caches full.
        """
        maker = PromptMaker(self.model.folder)
        peers = list(self.peers)
        for number in range(-1 if rehearse else 0, self.rounds):
            turn = "rehearsal" if number < 0 else f"round {number + 1}"
            for peer in tuple(peers):
                say(f"{self.model.name}: {peer.name}, {turn}")
                try:
                    yield from self._turn(peer, maker, number)
                except ServerFailed as error:
                    say(f"{error}\n{peer.name} takes no further part.")
                    peers.remove(peer)

    def _turn(self, peer: Peer, maker: PromptMaker, number: int) -> Iterator[Measurement]:
        log = self.logs / f"{self.model.name}-{peer.name.replace(os.sep, '_')}.log"
        with RunningServer(peer, self.model, self.limits, log) as server:
            if number < 0:
                return
            yield measure_startup(server, self.model.name, number)
            for case in self.cases:
                began = time.monotonic()
                measurement = measure(server, case, maker, number)
                say(f"  {case.name} took {time.monotonic() - began:.0f} s")
                for problem in measurement.problems:
                    say(f"  WRONG: {problem}")
                yield measurement


def say(text: str) -> None:
    """Tells what is going on; standard output is for the report alone."""
    print(text, file=sys.stderr, flush=True)
