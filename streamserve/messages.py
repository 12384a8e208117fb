"""What crosses between frontend and engine: a closed set of frames, their layouts and their codecs.

Every payload is little-endian and begins with the epoch (u32) of the engine start it belongs to; a reader
drops frames of another epoch. Encoders return a list of buffers for one gathered write into a ring; decoders
read a memoryview in place and must be done with it (or have copied) before the ring is released.

    frontend → engine                             engine → frontend
    ADD    one request, tokens and hashes         HELLO  what the engine is and can hold (JSON)
    ABORT  streams nobody waits for any more      STEP   one step's tokens for this frontend
    CALL   control call (JSON)                    REPLY  answer to a CALL (JSON)
    HANDOVER  to another frontend process         STATS  gauges and counters (JSON)
                                                  PROMPT_LOGPROBS  of a part of one prompt
                                                  RELAY  what another frontend asks (JSON)
                                                  BEGUN  streams that begin to run

A stream is named by the frontend: `generation << 32 | slot`. The engine only hands it back.

An engine that dies is followed by another on the same rings, under the next epoch. It says HELLO, and every
frontend gives it all requests that somebody still waits for, with the tokens that they have got.

A frontend that dies is followed by another on the same two rings; its place tells whose a frame is. In the
request ring the supervisor writes a HANDOVER behind the last frame of the dead one, with the `incarnation` of
its successor (how many there were before it): the engine drops all requests from before that. It answers with
a HELLO, which names the incarnation that it is for: a frontend heeds nothing that comes before its own HELLO.

CALL bodies are `{"method": …}`: `ping` and `reset_prefix_cache` are answered `{"ok": …}`. `relay` with a
`body` goes to every other frontend as a RELAY `{"origin": …, "body": …}` under the same call id and is
answered `{"asked": number of them}`. Each of those calls `relay_reply` with `to` (the origin), `call_id` and
its `body`, which reaches the one that asked, if it still lives, as one more REPLY, `{"answer": body}`.

STATS is flat; all values are whole numbers. Counters go up from the start of the engine.

    running, waiting              requests that hold a slot; that wait for one, preempted ones included
    num_blocks, free_blocks       KV cache blocks; those that no request holds
    prefix_queries, prefix_hits   counters: prompt tokens looked up in the prefix cache; found there
    preemptions, expired          counters: slots taken back for want of memory; deadlines missed in the queue
    prompt_tokens                 counter: prompt tokens of requests that began to run, found ones included
    generation_tokens             counter: tokens sampled
    steps, step_tokens            counters: steps; tokens that ran in them, prefill and decode together
    step_tokens_le_1 … _le_16384  counters: steps of at most so many tokens, each including the one before
    schedule_ns, execute_ns,      counters: host time of all steps, in three parts: taking messages in and
    settle_ns                     deciding; the worker; taking tokens in and sending them
    last_schedule_ns, last_…      the same of the last step alone

From a worker with graphs:

    graph_steps_none, _piecewise, counters: steps by how their forward ran
    _full
    graph_padded_tokens           counter: rows that were run for nothing
    graph_fallbacks               counter: steps that ran eagerly although their kind has graphs
    graphs_captured, _waiting     graphs that are there; that are still to be captured
    graphs_bytes                  memory of the GPU that those captured take

From a worker on a GPU:

    device_gaps, device_gap_ns    counters: pairs of steps of which the second was launched before the first
                                  was read; time between them in which the GPU had nothing to do

From a worker on a GPU that measured its memory (streamserve.worker.memory_profile), in bytes:

    gpu_memory_total, _budget     of the device; what of it the server may use
    gpu_memory_weights, _buffers, what it uses it for; graphs as estimated before they were captured
    _activations, _graphs, _other,
    _cache
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from streamserve.hashing import HASH_BYTES
from streamserve.sampling import SamplingParams, TokenSet

Buffer = bytes | bytearray | memoryview


class Kind(IntEnum):
    """The kind field of a ring frame."""

    ADD = 1
    ABORT = 2
    CALL = 3
    HANDOVER = 4
    HELLO = 16
    STEP = 17
    REPLY = 18
    STATS = 19
    PROMPT_LOGPROBS = 20
    RELAY = 21
    BEGUN = 22


# A request that has got so many tokens from an engine did not end those before it. One that may have is run
# alone for that long, and both sides count.
PROBATION_TOKENS = 8


class Finish(IntEnum):
    """Why a stream ended, or NONE while it goes on."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    EXPIRED = 5


# epoch, reply id, JSON
_CALL = struct.Struct("<II")
_EPOCH = struct.Struct("<I")
# epoch, number of streams
_ABORT = struct.Struct("<II")
# epoch, incarnation
_HANDOVER = struct.Struct("<II")
# epoch, number of streams, moment
_BEGUN = struct.Struct("<IIQ")
# epoch, streams, tokens, flags, step
_STEP = struct.Struct("<IIIIQ")
# Which columns a STEP frame has besides streams and tokens; above them how many top tokens a row of logprobs.
_HAS_COUNTS, _HAS_CACHED, _HAS_FINISH, _HAS_LOGPROBS, _NUM_TOP_SHIFT = 1, 2, 4, 8, 8
# epoch, first position, stream, positions, top tokens at each of them
_PROMPT_LOGPROBS = struct.Struct("<IIQII")
# epoch, bytes of the allowed tokens, stream, seed, num_prompt, num_output, max_tokens, min_tokens, top_k,
# priority, num_hashes, num_stop_ids, temperature, top_p, min_p, flags, deadline_ns
_ADD = struct.Struct("<IIQqIIIIIiIIdddIQ")
_IGNORE_EOS, _HAS_RUN, _IS_SUSPECT = 1, 2, 4
# How many different lots of rare parameters are shared between the requests that have them.
_NUM_SHARED = 16
# Rare parameters, sent as JSON behind the rest when they are not at their defaults.
_RARE_PARAMS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "bad_words",
    "logprobs",
    "prompt_logprobs",
)
_RARE_DEFAULTS = {name: getattr(SamplingParams(max_tokens=1), name) for name in _RARE_PARAMS}


@dataclass(frozen=True, slots=True)
class AddRequest:
    """A request as it enters the engine.

    Attributes:
        stream: the frontend's name for it, u64.
        tokens: int32[num_prompt + tokens so far].
        num_prompt: how many of `tokens` are prompt; the rest was generated by engines before this one.
        params: sampling settings; `max_tokens` counts from the end of the prompt.
        block_hashes: hash of each full block of the prompt (streamserve.hashing).
        priority: smaller runs earlier.
        deadline_ns: wall clock, ns since 1970; a request that has not begun to run by then is ended with
            `Finish.EXPIRED`. 0 waits as long as it takes.
        has_run: an engine before this one ran it: it goes before those that none has run.
        is_suspect: several of them ended while they ran it: it is to run alone, until it has got
            `PROBATION_TOKENS` tokens.
        tenant: whom the tokens are charged to under fair scheduling.
        cache_salt: requests with different salts share no KV block; in every block hash of the request.
    """

    stream: int
    tokens: npt.NDArray[np.int32]
    num_prompt: int
    params: SamplingParams
    block_hashes: Sequence[bytes]
    priority: int = 0
    deadline_ns: int = 0
    tenant: str = ""
    cache_salt: str = ""
    has_run: bool = False
    is_suspect: bool = False


def encode_add(epoch: int, request: AddRequest) -> list[Buffer]:
    """The ADD frame of `request`."""
    params = request.params
    allowed = b"" if params.allowed_token_ids is None else params.allowed_token_ids.bits
    header = _ADD.pack(
        epoch,
        len(allowed),
        request.stream,
        params.seed,
        request.num_prompt,
        len(request.tokens) - request.num_prompt,
        params.max_tokens,
        params.min_tokens,
        params.top_k,
        request.priority,
        len(request.block_hashes),
        len(params.stop_token_ids),
        params.temperature,
        params.top_p,
        params.min_p,
        _IGNORE_EOS * params.ignore_eos | _HAS_RUN * request.has_run | _IS_SUSPECT * request.is_suspect,
        request.deadline_ns,
    )
    stops = np.asarray(params.stop_token_ids, dtype="<i4")
    tokens = np.ascontiguousarray(request.tokens, dtype="<i4")
    hashes = b"".join(request.block_hashes)
    return [header, tokens.tobytes(), stops.tobytes(), hashes, allowed, _encode_rare(request)]


def _encode_rare(request: AddRequest) -> bytes:
    values = {name: getattr(request.params, name) for name in _RARE_PARAMS}
    params = {name: value for name, value in values.items() if value != _RARE_DEFAULTS[name]}
    if not (params or request.tenant or request.cache_salt):
        return b""
    return orjson.dumps({"params": params, "tenant": request.tenant, "cache_salt": request.cache_salt})


@lru_cache(maxsize=_NUM_SHARED)
def _decode_rare(tail: bytes, num_allowed: int) -> tuple[Mapping[str, Any], str, str]:
    """Rare sampling parameters, tenant and cache salt.

    A call with many prompts or choices sends the same again and again: its requests share what it is here.
    """
    allowed, rest = tail[:num_allowed], tail[num_allowed:]
    body: dict[str, Any] = orjson.loads(rest) if rest else {}
    params: dict[str, Any] = body.get("params", {})
    for name in ("logit_bias", "bad_words"):
        if name in params:
            params[name] = tuple(tuple(row) for row in params[name])
    if allowed:
        params["allowed_token_ids"] = TokenSet(allowed)
    return params, body.get("tenant", ""), body.get("cache_salt", "")


def decode_add(payload: memoryview) -> AddRequest:
    """The request in an ADD frame; owns its memory."""
    header = _ADD.unpack_from(payload)
    (_, num_allowed, stream, seed, num_prompt, num_output, max_tokens, min_tokens, top_k, priority,
     num_hashes, num_stops, temperature, top_p, min_p, flags, deadline_ns) = header  # fmt: skip
    num_tokens = num_prompt + num_output
    tokens_end = _ADD.size + 4 * num_tokens
    stops_end = tokens_end + 4 * num_stops
    tokens = np.frombuffer(payload, "<i4", num_tokens, _ADD.size).copy()
    stops = np.frombuffer(payload, "<i4", num_stops, tokens_end).tolist()
    hashes_end = stops_end + HASH_BYTES * num_hashes
    if hashes_end + num_allowed > len(payload):
        raise ValueError(f"an ADD frame of {len(payload)} bytes needs {hashes_end + num_allowed}")
    hashes = bytes(payload[stops_end:hashes_end])
    rare, tenant, cache_salt = _decode_rare(bytes(payload[hashes_end:]), num_allowed)
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        ignore_eos=bool(flags & _IGNORE_EOS),
        stop_token_ids=tuple(stops),
        **rare,
    )
    return AddRequest(
        stream=stream,
        tokens=tokens,
        num_prompt=num_prompt,
        params=params,
        block_hashes=[hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)],
        priority=priority,
        deadline_ns=deadline_ns,
        tenant=tenant,
        cache_salt=cache_salt,
        has_run=bool(flags & _HAS_RUN),
        is_suspect=bool(flags & _IS_SUSPECT),
    )


def stream_of_add(payload: memoryview) -> int | None:
    """The stream of an ADD frame that else cannot be read, for telling its frontend; None if too short."""
    if len(payload) < _ADD.size:
        return None
    stream: int = _ADD.unpack_from(payload)[2]
    return stream


def encode_abort(epoch: int, streams: Sequence[int]) -> list[Buffer]:
    """The ABORT frame for `streams`."""
    return [_ABORT.pack(epoch, len(streams)), np.asarray(streams, dtype="<u8").tobytes()]


def decode_abort(payload: memoryview) -> list[int]:
    """The streams in an ABORT frame."""
    _, count = _ABORT.unpack_from(payload)
    streams: list[int] = np.frombuffer(payload, "<u8", count, _ABORT.size).tolist()
    return streams


def encode_handover(epoch: int, incarnation: int) -> list[Buffer]:
    """The HANDOVER frame that comes before the frames of frontend `incarnation`."""
    return [_HANDOVER.pack(epoch, incarnation)]


def decode_handover(payload: memoryview) -> int:
    """The incarnation in a HANDOVER frame."""
    _, incarnation = _HANDOVER.unpack_from(payload)
    return int(incarnation)


def encode_json(epoch: int, body: Any) -> list[Buffer]:
    """A HELLO or STATS frame."""
    return [_EPOCH.pack(epoch), orjson.dumps(body)]


def decode_json(payload: memoryview) -> Any:
    """The body of a HELLO or STATS frame."""
    return orjson.loads(payload[_EPOCH.size :])


def encode_call(epoch: int, call_id: int, body: Any) -> list[Buffer]:
    """A CALL frame, or the REPLY to it or the RELAY of it, under the same `call_id`."""
    return [_CALL.pack(epoch, call_id), orjson.dumps(body)]


def decode_call(payload: memoryview) -> tuple[int, Any]:
    """`(call_id, body)` of a CALL, REPLY or RELAY frame."""
    _, call_id = _CALL.unpack_from(payload)
    return call_id, orjson.loads(payload[_CALL.size :])


def encode_begun(epoch: int, streams: Sequence[int], moment_ns: int) -> list[Buffer]:
    """A BEGUN frame: `streams` run from `moment_ns` on, on the monotonic clock that all processes share.

    Once for each stream, before its first token; a stream that is preempted later does not begin again.
    """
    return [_BEGUN.pack(epoch, len(streams), moment_ns), np.asarray(streams, dtype="<u8").tobytes()]


def decode_begun(payload: memoryview) -> tuple[list[int], int]:
    """`(streams, moment_ns)` of a BEGUN frame."""
    _, count, moment_ns = _BEGUN.unpack_from(payload)
    streams: list[int] = np.frombuffer(payload, "<u8", count, _BEGUN.size).tolist()
    return streams, moment_ns


def epoch_of(payload: memoryview) -> int:
    """The epoch that any payload begins with."""
    epoch: int = _EPOCH.unpack_from(payload)[0]
    return epoch


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities at some positions, before penalties, temperature and filters.

    Attributes:
        chosen: f32[t], of the token that is there.
        top_ids: i32[t, m], the likeliest tokens, likeliest first.
        top: f32[t, m], theirs.
    """

    chosen: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int32]
    top: npt.NDArray[np.float32]

    @classmethod
    def empty(cls, num_top: int) -> Logprobs:
        """No rows."""
        ids, top = np.zeros((0, num_top), dtype=np.int32), np.zeros((0, num_top), dtype=np.float32)
        return cls(np.zeros(0, dtype=np.float32), ids, top)

    @classmethod
    def join(cls, pieces: Sequence[Logprobs]) -> Logprobs:
        """Pieces of the same width, at least one, behind each other."""
        if len(pieces) == 1:
            return pieces[0]
        return cls(
            np.concatenate([piece.chosen for piece in pieces]),
            np.concatenate([piece.top_ids for piece in pieces]),
            np.concatenate([piece.top for piece in pieces]),
        )

    def rows(self, which: slice | npt.NDArray[Any], num_top: int | None = None) -> Logprobs:
        """Some of the rows, with at most `num_top` likeliest tokens; views where `which` is a slice."""
        return Logprobs(
            self.chosen[which], self.top_ids[which, slice(num_top)], self.top[which, slice(num_top)]
        )

    def parts(self) -> list[Buffer]:
        """The columns as bytes, in the order of the fields."""
        columns = (self.chosen, self.top_ids, self.top)
        return [np.ascontiguousarray(column).tobytes() for column in columns]

    @classmethod
    def at(cls, payload: memoryview, offset: int, num_rows: int, num_top: int) -> tuple[Logprobs, int]:
        """The columns at `offset` of a frame, as copies, and where they end."""
        size = 4 * num_rows
        chosen = np.frombuffer(payload, "<f4", num_rows, offset).copy()
        offset += size
        top_ids = np.frombuffer(payload, "<i4", num_rows * num_top, offset).reshape(num_rows, num_top).copy()
        offset += size * num_top
        top = np.frombuffer(payload, "<f4", num_rows * num_top, offset).reshape(num_rows, num_top).copy()
        return cls(chosen, top_ids, top), offset + size * num_top


@dataclass(slots=True)
class StepTokens:
    """One step's output for one frontend. Rows follow each other as the engine's slots do.

    Columns are arrays where they are made and typed memoryviews where they are read.

    Not frozen: a frozen dataclass costs three times as much to make, and each step makes one on both sides.

    Attributes:
        step: number of the engine step.
        streams: u64[n].
        tokens: i32[sum(counts)].
        counts: u32[n], how many of `tokens` belong to each stream, in order; None: one each.
        finish: u8[n], a `Finish` code each; None: no stream ends.
        cached: u32[n], prompt tokens found in the prefix cache, in steps where a stream has its first
            token (0 for the others); None in all other steps.
        logprobs: a row for each of `tokens`, wide enough for the stream that asked for most; rows of streams
            that asked for none mean nothing. None when no stream asked.
    """

    step: int
    streams: npt.NDArray[np.uint64] | memoryview
    tokens: npt.NDArray[np.int32] | memoryview
    counts: npt.NDArray[np.uint32] | memoryview | None = None
    finish: npt.NDArray[np.uint8] | memoryview | None = None
    cached: npt.NDArray[np.uint32] | memoryview | None = None
    logprobs: Logprobs | None = None

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """`(stream, number of tokens, finish code)` of each row."""
        counts = repeat(1) if self.counts is None else self.counts.tolist()
        finish = repeat(0) if self.finish is None else self.finish.tolist()
        return zip(self.streams.tolist(), counts, finish, strict=False)


def encode_step(epoch: int, out: StepTokens) -> list[Buffer]:
    """The STEP frame of `out`. Hot: once a step and frontend, whatever the number of streams."""
    # The arrays themselves, not their .data: they are buffers too, and making a view of each costs more.
    parts: list[Any] = [b"", out.streams, out.tokens]
    present = 0
    if out.counts is not None:
        present = _HAS_COUNTS
        parts.append(out.counts)
    if out.cached is not None:
        present |= _HAS_CACHED
        parts.append(out.cached)
    if out.finish is not None:
        present |= _HAS_FINISH
        parts.append(out.finish)
    if out.logprobs is not None:
        present |= _HAS_LOGPROBS | out.logprobs.top.shape[1] << _NUM_TOP_SHIFT
        # Behind the bytes of `finish`, so at any offset: they are read by copying.
        parts += out.logprobs.parts()
    parts[0] = _STEP.pack(epoch, len(out.streams), len(out.tokens), present, out.step)
    return parts


def decode_step(payload: memoryview) -> StepTokens:
    """The columns of a STEP frame, as views into the ring. Hot: once a step."""
    # A cast memoryview is made in a third of the time of an array, and its tolist() is faster.
    _, num_rows, num_tokens, present, step = _STEP.unpack_from(payload)
    at = _STEP.size + 8 * num_rows
    end = at + 4 * num_tokens
    if end > len(payload):
        raise ValueError(f"a STEP frame of {len(payload)} bytes needs {end}")
    streams = payload[_STEP.size : at].cast("Q")
    tokens = payload[at:end].cast("i")
    if not present:
        return StepTokens(step, streams, tokens)
    at = end
    counts = cached = finish = logprobs = None
    if present & _HAS_COUNTS:
        counts = payload[at : at + 4 * num_rows].cast("I")
        at += 4 * num_rows
    if present & _HAS_CACHED:
        cached = payload[at : at + 4 * num_rows].cast("I")
        at += 4 * num_rows
    if present & _HAS_FINISH:
        finish = payload[at : at + num_rows]
        at += num_rows
    if present & _HAS_LOGPROBS:
        logprobs, _ = Logprobs.at(payload, at, num_tokens, present >> _NUM_TOP_SHIFT)
    return StepTokens(step, streams, tokens, counts, finish, cached, logprobs)


def encode_prompt_logprobs(epoch: int, stream: int, start: int, logprobs: Logprobs) -> list[Buffer]:
    """A PROMPT_LOGPROBS frame: rows for the prompt tokens at positions `start`, `start + 1`, …"""
    num_rows, num_top = logprobs.top.shape
    return [_PROMPT_LOGPROBS.pack(epoch, start, stream, num_rows, num_top), *logprobs.parts()]


def decode_prompt_logprobs(payload: memoryview) -> tuple[int, int, Logprobs]:
    """`(stream, start, logprobs)` of a PROMPT_LOGPROBS frame; owns its memory."""
    _, start, stream, num_rows, num_top = _PROMPT_LOGPROBS.unpack_from(payload)
    logprobs, _ = Logprobs.at(payload, _PROMPT_LOGPROBS.size, num_rows, num_top)
    return stream, start, logprobs
