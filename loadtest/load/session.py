"""One load test: what locust's events mean for it."""

from __future__ import annotations

import logging
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import gevent
import httpx
from locust import LoadTestShape, runners
from locust.runners import MasterRunner, WorkerRunner
from locust.stats import CSV_STATS_INTERVAL_SEC

from loadtest.load import recorder
from loadtest.load.arrivals import Shape
from loadtest.load.client_cpu import ClientCpu
from loadtest.load.mixes import Mix
from loadtest.load.options import Settings
from loadtest.load.plot import plot
from loadtest.load.summary import Summary, table, write_csv
from loadtest.load.timeline import Counts, Timeline
from streamserve.bench.http import Address
from streamserve.bench.server import context_length, first_model, word_costs
from streamserve.bench.words import TextMaker
from streamserve.errors import StreamserveError

_SAMPLE_S = 1.0
# Of several processes: each tells its figures once a second, at moments of its own.
_SAMPLE_AT_MASTER_S = 3.0
_WRONG_OPTIONS = 2
_CPU_S = "streamserve_cpu_s"
_log = logging.getLogger(__name__)
# It would tell of each request of its own.
logging.getLogger("httpx").setLevel(logging.WARNING)


class UserShape(LoadTestShape):
    """A `Shape` as locust wants it."""

    # locust would take any shape that it finds, whatever the options say.
    abstract = True

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape

    def tick(self) -> tuple[int, float] | None:
        """Users, and how many may start or stop a second."""
        users = self._shape.users_at(self.get_run_time())
        return None if users is None else (users, float(self._shape.users))


class Session:
    """What users share, from the start of a test to its report.

    Args:
        environment: locust's.

    Attributes:
        settings: the options.
        mix: what is asked, while a test runs.
        model: who is asked.
    """

    mix: Mix
    model: str

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self.settings = Settings.of(environment.parsed_options)
        self._timeline = Timeline()
        self._begun = self._counted_from = 0.0
        self._cpu = ClientCpu()
        self._busiest = 0.0
        self._before = Counts()
        self._duration_s: float | None = None
        self._summary: Summary | None = None
        self._sampler: gevent.Greenlet | None = None

    def attach(self) -> None:
        """Makes users, shape and statistics what the options say, and listens to the events."""
        environment = self._environment
        # Timers count from the loop's idea of now. It is as old as the imports, and --run-time would be short
        # of them.
        gevent.get_hub().loop.update_now()
        recorder.use_fine_buckets()
        runners.WORKER_REPORT_INTERVAL = _SAMPLE_S
        for user_class in list(environment.user_classes):
            user_class.session = self
            user_class.weight = self.settings.weights[user_class.transport]
            if not user_class.weight:
                environment.user_classes.remove(user_class)
        if self.settings.shape is not None:
            environment.shape_class = UserShape(self.settings.shape)
            environment.shape_class.runner = environment.runner
        is_worker = isinstance(environment.runner, WorkerRunner)
        if not is_worker and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            gevent.signal_handler(signal.SIGINT, _interrupt)
        environment.events.test_start.add_listener(self._on_start)
        environment.events.test_stop.add_listener(self._on_stop)
        environment.events.report_to_master.add_listener(_on_report)
        environment.events.worker_report.add_listener(self._on_worker_report)
        environment.events.reset_stats.add_listener(self._on_reset)
        if environment.reset_stats:
            environment.events.spawning_complete.add_listener(self._on_reset)
        environment.events.quitting.add_listener(self._on_quitting)
        environment.events.quit.add_listener(self._on_quit)

    def rng(self) -> random.Random:
        """Chance for one more user: its own, and the same in each run with the same seed."""
        return random.Random(self._seeds.random())

    def _on_start(self, environment: Any, **_: Any) -> None:
        self._duration_s = None
        try:
            # Anew, for the web page or the master may have changed them.
            self.settings = Settings.of(environment.parsed_options)
            if not isinstance(environment.runner, MasterRunner):
                self._ask_server()
        except (ValueError, StreamserveError, httpx.InvalidURL) as error:
            self._give_up(str(error).replace("--base-url", "--host"))
        self._seeds = random.Random(f"{self.settings.seed}/{getattr(environment.runner, 'worker_index', 0)}")
        self._timeline, self._before = Timeline(), Counts()
        self._begun = time.monotonic()
        self._on_reset()
        if not isinstance(environment.runner, WorkerRunner):
            self._sampler = gevent.spawn(self._sample)

    def _on_reset(self, **_: Any) -> None:
        """locust's rows begin at zero."""
        self._counted_from = time.monotonic()
        self._cpu.restart()

    def _on_worker_report(self, client_id: str, data: dict[str, Any], **_: Any) -> None:
        self._cpu.report(client_id, data.get(_CPU_S, 0.0))

    def _give_up(self, why: str) -> NoReturn:
        """Ends the greenlet that would start the users; only that where a web page lets one try again."""
        _log.error("The load test cannot begin: %s", why)
        if self._environment.web_ui is None:
            self._environment.process_exit_code = _WRONG_OPTIONS
            self._environment.runner.quit()
        # locust would log any exception, and go on.
        raise gevent.GreenletExit

    def _ask_server(self) -> None:
        """Finds out what prompts can be made of. Here, for the web page may have changed the host."""
        settings, host = self.settings, self._environment.host or ""
        Address.of(host, "")
        headers = headers_of(settings)
        with httpx.Client(base_url=host, headers=headers, timeout=30.0, trust_env=False) as client:
            self.model = settings.model or first_model(client)
            lengths = settings.lengths.within(context_length(client, self.model))
            maker = TextMaker(word_costs(client, self.model, _log.warning))
        self.mix = Mix(settings.mix, lengths, maker, settings.seed)

    def _sample(self) -> None:
        is_master = isinstance(self._environment.runner, MasterRunner)
        while True:
            gevent.sleep(_SAMPLE_AT_MASTER_S if is_master else _SAMPLE_S)
            self._add_sample(self._environment.runner.user_count)

    def _add_sample(self, users: int) -> None:
        now = recorder.counts(self._environment.stats, time.monotonic() - self._begun)
        self._timeline.add(now.since(self._before, users))
        self._before = now

    def _on_stop(self, **_: Any) -> None:
        if self._sampler is None:
            return
        self._sampler.kill()
        self._sampler = None
        self._duration_s = time.monotonic() - self._counted_from
        if not self._timeline.samples:
            # So short a run has a picture too.
            self._add_sample(self._environment.runner.target_user_count)
        self._busiest = self._cpu.busiest()

    def _on_quitting(self, environment: Any, **_: Any) -> None:
        if self._sampler is not None:
            # Ended by a signal. locust would end the test after this, too late to be judged and written.
            environment.runner.quit()
        if self._duration_s is None:
            return
        prefix = environment.parsed_options.csv_prefix
        if prefix:
            # locust's own files are written now and then; let them see the end.
            gevent.sleep(CSV_STATS_INTERVAL_SEC * 1.2)
        # Not before: the last figures of workers come after the end of the test.
        self._summary = recorder.summary_of(environment.stats, self._duration_s, self._busiest)
        self._write(self._summary, prefix)
        if environment.process_exit_code is None and not environment.runner.exceptions:
            self._judge(self._summary)

    def _judge(self, summary: Summary) -> None:
        """Sets the exit code, unless that is locust's to do."""
        thresholds = self.settings.thresholds
        missed = list(thresholds.missed(summary))
        for line in missed:
            _log.error("Threshold: %s", line)
        # Errors are locust's to judge unless there is a threshold for them.
        if missed or thresholds.max_error_rate is not None:
            self._environment.process_exit_code = int(bool(missed))
        if not summary.requests and isinstance(self._environment.runner, MasterRunner):
            _log.error("No worker has ended a request; their own logs may say why.")
            self._environment.process_exit_code = _WRONG_OPTIONS

    def _write(self, summary: Summary, prefix: str | None) -> None:
        picture = Path(self.settings.plot or f"{prefix}_load.png")
        if prefix:
            write_csv(summary, Path(f"{prefix}_summary.csv"))
        if (prefix or self.settings.plot) and self._timeline.samples:
            peak = max(sample.users for sample in self._timeline.samples)
            plot(self._timeline.samples, summary, picture, f"{peak} users, {self._what()}")
            _log.info("Picture: %s", picture)

    def _what(self) -> str:
        settings = self.settings
        how = "closed loop"
        if settings.is_open_loop:
            how = f"Poisson, {settings.request_rate:g} requests/s each"
        who = " and ".join(name for name, weight in settings.weights.items() if weight)
        return f"{who}, {how}, {' + '.join(settings.mix)}"

    def _on_quit(self, **_: Any) -> None:
        if self._summary is not None:
            print(f"\n{table(self._summary)}\n", file=sys.stderr, flush=True)


def _interrupt() -> None:
    """Ctrl-C for locust's main greenlet. Else it would be an error of whichever user runs just then."""
    gevent.get_hub().handle_system_error(KeyboardInterrupt, KeyboardInterrupt())


def _on_report(data: dict[str, Any], **_: Any) -> None:
    data[_CPU_S] = time.process_time()


def headers_of(settings: Settings) -> dict[str, str]:
    """The headers of every request."""
    return {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
