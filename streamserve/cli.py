"""The command line. Each command loads only what it needs, and none loads torch."""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import sys
from typing import Any

import streamserve
from streamserve import config
from streamserve.bench import options as bench_options
from streamserve.errors import ConfigError, StreamserveError

DEFAULT_URL = "http://127.0.0.1:8000"
COMPLETE_MAX_TOKENS = 256

# Descriptors that a server has open with nobody connected, with some to spare; and for each more frontend.
_LEAST_DESCRIPTORS = 96
_FRONTEND_DESCRIPTORS = 16

_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Entry point of the `streamserve` command; returns its exit code.

    0: done. 1: it failed. 2: the command line or the configuration is wrong. 130: ended by Ctrl-C.
    """
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except ConfigError as error:
        return _complain(error, 2)
    except StreamserveError as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); the interpreter's flush at exit must not fail as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _complain(error: StreamserveError, code: int) -> int:
    message = " ".join(str(error).split())
    # Whoever started this process may have closed it.
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"streamserve: error: {message}\n")
            sys.stderr.flush()
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="streamserve", description=streamserve.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"streamserve {streamserve.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_chat(commands)
    _add_complete(commands)
    _add_bench(commands)
    return parser


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="start a server",
        usage="streamserve serve [MODEL] [options]",
        description="Serves a model over the OpenAI API until Ctrl-C or SIGTERM.",
        epilog="Each option can also be given in a YAML file (--config) or as a variable: "
        "--max-num-seqs is STREAMSERVE_MAX_NUM_SEQS. Flags win over variables, variables over the file.",
        allow_abbrev=False,
    )
    config.add_arguments(parser)
    parser.set_defaults(run=_serve)


def _add_chat(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a running server",
        description="Talks to a running server. Ctrl-C stops an answer, Ctrl-D ends the conversation. "
        "When stdin is no terminal, each line of it is one turn.",
        allow_abbrev=False,
    )
    _add_request_options(parser, max_tokens=None)
    parser.add_argument("--system", metavar="TEXT", help="system message that the conversation begins with")
    parser.set_defaults(run=_chat)


def _add_complete(commands: Any) -> None:
    parser = commands.add_parser(
        "complete",
        help="continue a text with a running server",
        description="Continues a text with a running server and prints the continuation as it comes.",
        allow_abbrev=False,
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads it from stdin")
    _add_request_options(parser, max_tokens=COMPLETE_MAX_TOKENS)
    parser.set_defaults(run=_complete)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure a running server", allow_abbrev=False)
    benchmarks = bench.add_subparsers(metavar="BENCHMARK", required=True)
    parser = benchmarks.add_parser(
        "serve",
        help="latencies and throughput of streamed answers",
        description="Sends requests to a running server and reports latencies and throughput. Options, names "
        "and definitions are those of `vllm bench serve`. A key is taken from OPENAI_API_KEY.",
        allow_abbrev=False,
    )
    bench_options.add_arguments(parser)
    parser.set_defaults(run=_bench_serve)


def _add_request_options(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    limit = "the model's limit" if max_tokens is None else max_tokens
    parser.add_argument("--url", default=DEFAULT_URL, help="address of the server (default: %(default)s)")
    parser.add_argument("--model", metavar="NAME", help="model name (default: the server's first model)")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the model's)")
    parser.add_argument("--top-p", type=float, metavar="P", help="nucleus mass (default: the model's)")
    parser.add_argument("--seed", type=int, metavar="N", help="makes the random choices repeatable")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", default=max_tokens, help=f"longest answer (default: {limit})"
    )


def _request_options(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("model", "temperature", "top_p", "seed", "max_tokens")
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def _serve(arguments: argparse.Namespace) -> int:
    from streamserve.supervisor import serve

    _open_missing_streams()
    loaded = config.load(arguments)
    _check_descriptors(loaded.server.api_workers)
    return serve(loaded)


def _check_descriptors(num_frontends: int) -> None:
    # Of two limits the server raises the lower one to the other by itself.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = _LEAST_DESCRIPTORS + _FRONTEND_DESCRIPTORS * (num_frontends - 1)
    if most != resource.RLIM_INFINITY and most < least:
        raise ConfigError(
            f"a process may have {most} files open here, and the server needs {least}, and one more for each "
            "connection: raise the limit (ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of docker)"
        )


def _open_missing_streams() -> None:
    # Whoever started this process may have closed them. Their numbers must not go to a socket or a segment:
    # what any library of any child prints would land there.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = os.fdopen(os.open(os.devnull, os.O_RDWR), mode)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _chat(arguments: argparse.Namespace) -> int:
    from streamserve.terminal import chat

    return chat(arguments.url, _request_options(arguments), arguments.system)


def _complete(arguments: argparse.Namespace) -> int:
    from streamserve.terminal import complete

    return complete(arguments.url, _request_options(arguments), arguments.prompt)


def _bench_serve(arguments: argparse.Namespace) -> int:
    options = bench_options.check(arguments, config.client_api_key())
    from streamserve.bench.serve import serve

    return serve(options)
