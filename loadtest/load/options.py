"""The options that the load test adds to locust's own."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loadtest.load.arrivals import SHAPES, Shape
from loadtest.load.mixes import KINDS, Lengths, parse_mix
from loadtest.load.thresholds import Thresholds

_DEFAULTS = Lengths()


@dataclass(frozen=True, slots=True)
class Settings:
    """The options, checked.

    Attributes:
        weights: of the users, by transport.
        is_open_loop: requests come at `request_rate` a user, whether or not earlier ones are answered.
        request_rate: requests a second and user, in an open loop.
        think_time_s: mean pause after an answer, in a closed loop.
        max_open: requests of a user that may be open at once, in an open loop.
        shape: of the number of users; None: it is constant.
        mix: weights by kind of prompt.
        lengths: of the prompts.
        stops_at_eos: answers may end before they have all tokens.
        model: to ask for; empty: the server's first.
        api_key: of each request; empty: none.
        seed: of what is asked and when.
        timeout_s: for a whole answer.
        plot: path of the picture; empty: beside the CSV files.
        thresholds: what must be reached.
    """

    weights: dict[str, float]
    is_open_loop: bool
    request_rate: float
    think_time_s: float
    max_open: int
    shape: Shape | None
    mix: dict[str, float]
    lengths: Lengths
    stops_at_eos: bool
    model: str
    api_key: str
    seed: int
    timeout_s: float
    plot: str
    thresholds: Thresholds

    @classmethod
    def of(cls, options: Namespace) -> Settings:
        """Checks parsed options.

        Raises:
            ValueError: one is wrong; names it.
        """
        weights = {"SSE": options.sse_weight, "WS": options.websocket_weight}
        if min(weights.values()) < 0.0 or not any(weights.values()):
            raise ValueError("--sse-weight and --websocket-weight must be at least 0, and one of them more")
        for name in ("request_rate", "max_open", "steps", "request_timeout"):
            if not 0.0 < getattr(options, name) < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} must be more than 0")
        try:
            mix = parse_mix(options.mix)
        except ValueError as error:
            raise ValueError(f"--mix: {error}") from None
        return cls(
            weights=weights,
            is_open_loop=options.arrivals == "poisson",
            request_rate=options.request_rate,
            think_time_s=options.think_time,
            max_open=options.max_open,
            shape=_shape(options),
            mix=mix,
            lengths=Lengths(
                shared_prefix=options.shared_prefix_tokens,
                document=options.document_tokens,
                most_output=options.max_output_tokens,
            ),
            stops_at_eos=options.stop_at_eos,
            model=options.model,
            api_key=options.api_key or "",
            seed=options.seed,
            timeout_s=options.request_timeout,
            plot=options.plot,
            thresholds=Thresholds(
                options.max_ttft_p95, options.max_itl_p99, options.min_tokens_per_s, options.max_error_rate
            ),
        )


def _shape(options: Namespace) -> Shape | None:
    # Of several processes only the one that leads knows of a shape, and of a run time.
    if options.load_shape == "constant" or options.worker:
        return None
    if not options.run_time:
        raise ValueError(f"--load-shape {options.load_shape} needs --run-time")
    return Shape(options.load_shape, options.num_users or 1, float(options.run_time), options.steps)


def add_options(parser: Any) -> None:
    """Adds the options to locust's parser."""
    group = parser.add_argument_group("Chat load", "Who asks what, and when.")
    _add_users(group.add_argument)
    add = _on_page(group)
    add(
        "--arrivals",
        choices=["closed", "poisson"],
        default="closed",
        help="closed: each user waits for an answer, thinks, and asks again. poisson: requests come at "
        "--request-rate of each user, whether or not earlier ones are answered",
    )
    add("--think-time", type=float, default=0.0, metavar="S", help="closed: mean pause after an answer")
    add("--request-rate", type=float, default=1.0, metavar="R", help="poisson: requests/s of each user")
    add(
        "--max-open",
        type=int,
        default=64,
        metavar="N",
        help="poisson: more open requests of a user are errors",
    )
    add(
        "--mix",
        default="sharegpt",
        metavar="KIND[:WEIGHT],…",
        help=f"prompts: {', '.join(KINDS)}, for example sharegpt:8,document:1",
    )
    _add_lengths(add)
    add(
        "--stop-at-eos",
        action="store_true",
        help="answers may end by themselves, before they are full",
    )
    add("--model", default="", metavar="NAME", help="(default: the server's first)")
    # Only the parser itself, not its groups, knows of secrets and of variables.
    parser.add_argument(
        "--api-key", default="", env_var="OPENAI_API_KEY", is_secret=True, metavar="KEY", help="of the server"
    )
    add("--seed", type=int, default=0, metavar="N", help="of what is asked and when")
    add("--request-timeout", type=float, default=600.0, metavar="S", help="for a whole answer")
    group.add_argument(
        "--plot",
        default="",
        metavar="FILE",
        help="picture of the run (default: PREFIX_load.png, with --csv PREFIX)",
    )
    _add_thresholds(parser)


def _on_page(group: Any) -> Callable[..., None]:
    """Adds arguments to a group that are fields of locust's page too, as it does for the parser's own."""

    def add(*names: str, **settings: Any) -> None:
        action = group.add_argument(*names, **settings)
        action.include_in_web_ui = True

    return add


def _add_users(add: Any) -> None:
    """Who there is: settled when locust begins, so these are no fields of its page."""
    add("--sse-weight", type=float, default=1.0, metavar="W", help="share of users on server-sent events")
    add("--websocket-weight", type=float, default=1.0, metavar="W", help="share of users on WebSockets")
    add(
        "--load-shape",
        choices=list(SHAPES),
        default="constant",
        help="how the number of users comes to --users within --run-time",
    )
    add("--steps", type=int, default=4, metavar="N", help="of --load-shape steps")


def _add_lengths(add: Any) -> None:
    add(
        "--shared-prefix-tokens",
        type=int,
        default=_DEFAULTS.shared_prefix,
        metavar="N",
        help="that all shared-prefix prompts begin with",
    )
    add("--document-tokens", type=int, default=_DEFAULTS.document, metavar="N", help="of a document")
    add("--max-output-tokens", type=int, default=_DEFAULTS.most_output, metavar="N", help="of any answer")


def _add_thresholds(parser: Any) -> None:
    group = parser.add_argument_group("Thresholds", "A run that misses one ends with exit code 1.")
    group.add_argument("--max-ttft-p95", type=float, metavar="MS", help="time to the first token")
    group.add_argument("--max-itl-p99", type=float, metavar="MS", help="time between tokens")
    group.add_argument("--min-tokens-per-s", type=float, metavar="N", help="output tokens of all users")
    group.add_argument(
        "--max-error-rate", type=float, metavar="R", help="share of requests that fail, 0 to 1"
    )
