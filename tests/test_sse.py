"""Framing and meaning of a completion stream. Stamps are handed in, so nothing here waits."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvlab import sse
from kvlab.sse import Answer, EventReader, ServerEvent

DONE = "[DONE]"


def feed(*reads: bytes) -> list[ServerEvent]:
    reader = EventReader()
    return [event for data in reads for event in reader.feed(data)]


def data(*reads: bytes) -> list[str]:
    return [event.data for event in feed(*reads)]


def answer(*timed: tuple[float, Any]) -> Answer:
    """The answer to (seconds, event) pairs; an event is a JSON value or ``[DONE]``."""
    arrivals = []
    for at_s, body in timed:
        text = body if isinstance(body, str) else json.dumps(body)
        arrivals.append((round(at_s * 1e9), f"data: {text}\n\n".encode()))
    return sse.read(arrivals)


def choice(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, **fields}]}


def delta(**fields: Any) -> dict[str, Any]:
    return choice(delta=fields)


class TestFraming:
    def test_lf_and_crlf_end_lines(self) -> None:
        assert data(b"data: a\n\ndata: b\r\n\r\ndata: c\n\r\n") == ["a", "b", "c"]

    def test_one_event_in_many_reads_and_many_events_in_one(self) -> None:
        assert data(b"da", b"ta: a", b"b\r", b"\n", b"\r\nda", b"ta: c\n\ndata: d\n\n") == [
            "ab",
            "c",
            "d",
        ]

    @pytest.mark.parametrize("comment", [b":\n", b": ping\n", b": ping\n\n", b":data: x\r\n\r\n"])
    def test_comments_are_ignored(self, comment: bytes) -> None:
        assert data(comment * 3 + b"data: a\n" + comment[: comment.find(b"\n") + 1] + b"\n") == [
            "a"
        ]

    def test_data_lines_are_joined_by_lf(self) -> None:
        assert data(b"data: {\ndata:  1\ndata:\ndata\ndata: }\n\n") == ["{\n 1\n\n\n}"]

    def test_one_space_after_the_colon_is_dropped(self) -> None:
        assert data(b"data:a\n\ndata:  b\n\ndata:\tc\n\n") == ["a", " b", "\tc"]

    def test_other_fields_do_not_make_events(self) -> None:
        assert data(b"id: 1\nretry: 5\nevent: ping\nfoo: bar\ndatax: 1\n\ndata: a\n\n") == ["a"]

    def test_empty_data_is_not_dispatched_and_a_name_does_not_leak(self) -> None:
        assert feed(b"event: ping\ndata:\n\ndata: a\n\n") == [ServerEvent("a")]

    def test_the_name_is_kept(self) -> None:
        assert feed(b"event: error\ndata: a\n\n") == [ServerEvent("a", "error")]

    @pytest.mark.parametrize(
        "mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r"]
    )
    def test_other_line_breaks_are_payload(self, mark: str) -> None:
        assert data(f"data: a{mark}b\n\n".encode()) == [f"a{mark}b"]

    def test_characters_cut_between_reads(self) -> None:
        raw = 'data: "ığ中🎈"\n\n'.encode()
        assert data(*(raw[i : i + 1] for i in range(len(raw)))) == ['"ığ中🎈"']

    def test_bad_utf8_is_replaced(self) -> None:
        assert data(b"data: a\xffb\n\n") == ["a\ufffdb"]

    @pytest.mark.parametrize("cut", range(1, 8))
    def test_one_byte_order_mark_is_dropped(self, cut: int) -> None:
        raw = b"\xef\xbb\xbfdata: a\n\n"
        assert data(raw[:cut], raw[cut:]) == ["a"]

    def test_a_second_byte_order_mark_is_not(self) -> None:
        assert data(b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\ndata: b\n\n") == ["b"]

    @pytest.mark.parametrize("end", [b"", b"\n", b"\r", b"\r\n"])
    def test_an_event_without_its_blank_line_is_not_dispatched(self, end: bytes) -> None:
        assert data(b"data: a\n\ndata: [DONE]" + end) == ["a"]

    def test_a_large_event_in_small_reads(self) -> None:
        raw = b"data: " + b"x" * 300_000 + b"\n\n"
        assert data(*(raw[i : i + 7] for i in range(0, len(raw), 7))) == ["x" * 300_000]


class TestFirstToken:
    def test_role_chunk_is_not_the_first_token(self) -> None:  # P-01
        got = answer(
            (0.90, delta(role="assistant", content="")), (2.20, delta(content="A")), (2.22, DONE)
        )
        assert got.first_token_ns == 2_200_000_000
        assert got.first_event_ns == 900_000_000
        assert got.done_ns == 2_220_000_000
        assert got.first_token_kind == "content"

    def test_empty_text_with_a_logprob_is_a_token(self) -> None:  # P-01, test 2
        first = choice(text="", logprobs={"tokens": ["\ufffd"], "token_logprobs": [-0.3]})
        later = choice(text="é", logprobs={"tokens": ["x"], "token_logprobs": [-0.1]})
        got = answer((1.00, first), (1.02, later), (1.03, DONE))
        assert got.first_token_ns == 1_000_000_000
        assert got.first_token_kind == "logprobs"
        assert got.token == "\ufffd"

    @pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
    def test_reasoning_is_the_first_token(self, key: str) -> None:  # P-02
        usage = {"choices": [], "usage": {"prompt_tokens": 4096, "completion_tokens": 9}}
        got = answer(
            (0.50, delta(**{key: "Hm"})), (3.00, delta(content="42")), (3.01, usage), (3.01, DONE)
        )
        assert got.first_token_ns == 500_000_000
        assert got.first_token_kind == "reasoning"
        assert got.completion_tokens == 9
        assert got.error is None

    @pytest.mark.parametrize(
        ("body", "kind"),
        [
            (choice(text="A"), "text"),
            (choice(text=" "), "text"),
            (choice(text="", token_ids=[0]), "token_ids"),
            (delta(content=None, token_ids=[7]), "token_ids"),
            (delta(content=[{"type": "text", "text": "A"}]), "content"),
            (delta(tool_calls=[{"index": 0, "function": {"name": "f"}}]), "tool_calls"),
            (delta(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]), "tool_calls"),
            (delta(function_call={"name": "f", "arguments": ""}), "tool_calls"),
            (delta(refusal="No"), "content"),
            (choice(delta={"content": ""}, logprobs={"content": [{"token": ""}]}), "logprobs"),
            (choice(text="", logprobs={"tokens": ["a"]}), "logprobs"),
            (choice(text="", logprobs={"token_logprobs": [-1.0]}), "logprobs"),
        ],
    )
    def test_what_proves_a_token(self, body: dict[str, Any], kind: str) -> None:
        got = answer((1.0, body), (2.0, DONE))
        assert (got.first_token_kind, got.first_token_ns) == (kind, 1_000_000_000)

    @pytest.mark.parametrize(
        "body",
        [
            delta(role="assistant"),
            delta(role="assistant", content=None, reasoning=None, reasoning_content=""),
            delta(tool_calls=[]),
            delta(tool_calls=[{"index": 0, "id": "c", "type": "function", "function": {}}]),
            delta(content=[{"type": "text", "text": ""}]),
            choice(text=""),
            choice(text="", token_ids=[], prompt_token_ids=[1, 2, 3]),
            choice(text="", token_ids=None, logprobs=None),
            choice(text="", logprobs={"tokens": [], "token_logprobs": [], "top_logprobs": []}),
            choice(delta={}, logprobs={"content": []}),
            choice(text="", finish_reason="length"),
            choice(text=5, delta="A", logprobs="B", token_ids="C"),
            {"choices": []},
            {"choices": None},
            {"choices": "A"},
            {"choices": ["A", None]},
            {},
            {"error": None, "choices": [{"text": ""}]},
        ],
    )
    def test_what_does_not(self, body: dict[str, Any]) -> None:
        got = answer((1.0, body), (2.0, DONE))
        assert got.first_token_ns is None
        assert got.first_event_ns == 1_000_000_000
        assert got.error is None

    def test_the_read_that_completes_the_event_gives_the_stamp(self) -> None:
        raw = b'data: {"choices":[{"text":"A"}]}\n\n'
        got = sse.read([(1, raw[:9]), (2, raw[9:-1]), (3, raw[-1:]), (4, b"data: [DONE]\n\n")])
        assert (got.first_event_ns, got.first_token_ns, got.done_ns) == (3, 3, 4)

    def test_the_first_done_counts(self) -> None:
        assert answer((1.0, DONE), (2.0, DONE)).done_ns == 1_000_000_000

    def test_a_comment_is_no_event(self) -> None:  # P-04
        got = sse.read([(1, b": keep-alive\n\n"), (2, b'data: {"choices":[{"text":"A"}]}\n\n')])
        assert (got.first_event_ns, got.first_token_ns, got.error) == (2, 2, None)


class TestFirstTokenIdentity:
    def test_completion_logprobs(self) -> None:
        logprobs = {
            "tokens": ["token_id:5", "token_id:6"],
            "token_logprobs": [-0.5, -0.1],
            "top_logprobs": [{"token_id:5": -0.5, "token_id:9": -1}, {"token_id:6": -0.1}],
        }
        got = answer((1.0, choice(text="ab", logprobs=logprobs)), (1.1, choice(text="c")))
        assert got.token == "token_id:5"
        assert got.top_logprobs == {"token_id:5": -0.5, "token_id:9": -1.0}

    def test_chat_logprobs(self) -> None:
        entry = {"token": "A", "logprob": -0.5, "top_logprobs": [{"token": "A", "logprob": -0.5}]}
        got = answer((1.0, choice(delta={"content": "A"}, logprobs={"content": [entry]})))
        assert (got.token, got.top_logprobs) == ("A", {"A": -0.5})

    def test_only_an_id(self) -> None:
        got = answer((1.0, choice(text="", token_ids=[0, 4])))
        assert (got.token, got.top_logprobs) == ("token_id:0", None)

    def test_text_alone_names_no_token(self) -> None:
        assert answer((1.0, choice(text="A"))).token is None

    @pytest.mark.parametrize("value", [None, "x", float("nan"), float("-inf"), 10**400, -(10**20)])
    def test_a_logprob_that_is_no_number_is_left_out(self, value: Any) -> None:
        logprobs = {"tokens": ["a"], "top_logprobs": [{"a": value, "b": -2.0}]}
        assert answer((1.0, choice(text="a", logprobs=logprobs))).top_logprobs == {"b": -2.0}

    def test_lone_surrogates_can_be_written_to_a_file(self) -> None:
        raw = r'{"choices":[{"logprobs":{"tokens":["\ud83d"],"top_logprobs":[{"\ud83d":-1}]}}]}'
        got = answer((1.0, raw))
        assert (got.token, got.top_logprobs) == ("?", {"?": -1.0})


class TestUsage:
    def test_usage_is_read_without_choices(self) -> None:  # P-07
        details = {"cached_tokens": 1120}
        usage = {"prompt_tokens": 1130, "completion_tokens": 1, "prompt_tokens_details": details}
        got = answer((1.0, choice(text="A")), (1.1, {"choices": [], "usage": usage}), (1.1, DONE))
        assert (got.prompt_tokens, got.completion_tokens, got.cached_tokens) == (1130, 1, 1120)

    def test_usage_is_read_without_the_key_choices(self) -> None:  # P-05
        for seen in (4000, 4106, 3987):
            got = answer((1.0, {"usage": {"prompt_tokens": seen, "completion_tokens": 1}}))
            assert got.prompt_tokens == seen

    @pytest.mark.parametrize(
        "details", [None, {}, {"cached_tokens": None}, {"cached_tokens": "12"}, [], 7]
    )
    def test_an_unknown_cached_count_is_not_zero(self, details: Any) -> None:  # P-07
        usage = {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": details}
        got = answer((1.0, {"choices": [], "usage": usage}))
        assert got.cached_tokens is None
        assert got.prompt_tokens == 5

    def test_a_cached_count_of_zero_is_zero(self) -> None:
        usage = {"prompt_tokens_details": {"cached_tokens": 0}}
        assert answer((1.0, {"usage": usage})).cached_tokens == 0

    @pytest.mark.parametrize("prefix", ["", "num_"])
    def test_local_and_external_counts(self, prefix: str) -> None:
        details = {f"{prefix}local_cached_tokens": 3, f"{prefix}external_cached_tokens": 0}
        got = answer((1.0, {"usage": {"prompt_tokens_details": details}}))
        assert (got.local_cached_tokens, got.external_cached_tokens) == (3, 0)

    def test_the_last_count_wins_and_null_does_not_erase(self) -> None:
        first = {"prompt_tokens": 5, "completion_tokens": 1}
        got = answer((1.0, {**choice(text="A"), "usage": first}), (1.1, {"usage": None}))
        assert (got.prompt_tokens, got.completion_tokens) == (5, 1)
        got = answer((1.0, {"usage": first}), (1.1, {"usage": {"completion_tokens": 2}}))
        assert (got.prompt_tokens, got.completion_tokens) == (5, 2)

    @pytest.mark.parametrize("count", [True, -1, 1.5, "4", 10**400])
    def test_a_count_that_is_none_is_unknown(self, count: Any) -> None:
        assert answer((1.0, {"usage": {"prompt_tokens": count}})).prompt_tokens is None


GONE = {"message": "engine is gone", "type": "InternalServerError", "code": 500}


class TestErrors:
    @pytest.mark.parametrize(
        "body",
        [
            {"error": GONE},  # P-03 a
            {"error": "engine is gone"},
            {"error": {"message": "engine is gone"}, "choices": [{"text": "A"}]},
            {"object": "error", "message": "engine is gone", "code": 500},
            choice(text="", finish_reason="error", error={"message": "engine is gone"}),
        ],
    )
    def test_in_band(self, body: dict[str, Any]) -> None:
        got = answer((1.0, body), (1.1, DONE))
        assert got.error is not None
        assert got.error.startswith("in-band error: ")
        assert "engine is gone" in got.error
        assert got.first_token_ns is None

    @pytest.mark.parametrize("reason", ["abort", "error"])
    def test_a_finish_reason_that_says_failed(self, reason: str) -> None:
        got = answer((1.0, choice(text="A")), (1.1, choice(text="", finish_reason=reason)))
        assert got.error == f'error after token: "{reason}"'

    @pytest.mark.parametrize("error", [{}, 500, ["x"], True])
    def test_an_odd_error_is_still_one(self, error: Any) -> None:
        assert str(answer((1.0, {"error": error})).error).startswith("in-band error: ")

    def test_an_event_named_error(self) -> None:
        assert sse.read([(1, b"event: error\ndata: out of memory\n\n")]).error == (
            "in-band error: out of memory"
        )

    def test_after_a_token(self) -> None:  # P-03 c
        got = answer((1.0, choice(text="A")), (1.1, {"error": GONE}), (1.2, DONE))
        assert got.error == "error after token: engine is gone"
        assert got.first_token_ns == 1_000_000_000

    def test_the_first_error_is_kept(self) -> None:
        got = answer((1.0, {"error": "one"}), (1.1, {"error": "two"}))
        assert got.error == "in-band error: one"

    @pytest.mark.parametrize("text", ['{"choices":[{"te', "ping", "7", "null", "[" * 100_000])
    def test_an_unreadable_event(self, text: str) -> None:
        assert str(answer((1.0, text)).error).startswith("malformed event: ")

    def test_details_are_one_short_printable_line(self) -> None:
        got = answer((1.0, {"error": {"message": "\x1b[31mbad\n\nline\ud83d " + "x" * 9999}}))
        assert got.error is not None
        assert got.error.startswith("in-band error: [31mbad line x")
        assert len(got.error) < 400
        assert got.error.isprintable()


# Any valid stream, cut anywhere, is the same stream.

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
BODIES = st.one_of(
    TEXT.map(lambda text: choice(text=text)),
    TEXT.map(lambda text: delta(content=text)),
    st.just(delta(role="assistant", content="")),
    st.builds(
        lambda tokens: choice(text="", logprobs={"tokens": tokens, "top_logprobs": [{"a": -1}]}),
        st.lists(TEXT, max_size=2),
    ),
    st.builds(
        lambda n, cached: {
            "choices": [],
            "usage": {"prompt_tokens": n, "prompt_tokens_details": {"cached_tokens": cached}},
        },
        st.integers(0, 9000),
        st.none() | st.integers(0, 9000),
    ),
    st.just({"error": GONE}),
)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """A stream as some server might frame it: comments, both line ends, split data lines."""
    out = draw(st.sampled_from([b"", b"\xef\xbb\xbf"]))
    for body in draw(st.lists(BODIES, max_size=5)):
        end = draw(st.sampled_from([b"\n", b"\r\n"]))
        space = draw(st.sampled_from([b"", b" "]))
        indent = draw(st.sampled_from([None, 1]))
        lines = json.dumps(body, ensure_ascii=draw(st.booleans()), indent=indent).encode()
        if draw(st.booleans()):
            out += b": keep-alive" + end + draw(st.sampled_from([b"", end]))
        for line in lines.split(b"\n"):
            out += b"data:" + (space or b" " * line.startswith(b" ")) + line + end
        out += end
    return out + draw(st.sampled_from([b"", b"data: [DONE]\n\n", b"data: [DONE]", b"data: {"]))


def cut(raw: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(raw) + 1) for place in places), len(raw)]
    return [raw[a:b] for a, b in itertools.pairwise(edges)]


def facts(arrivals: list[tuple[int, bytes]]) -> dict[str, Any]:
    """The fields of an answer; of a stamp, whether it is there."""
    fields = dataclasses.asdict(sse.read(arrivals))
    return {k: v is not None if k.endswith("_ns") else v for k, v in fields.items()}


@given(streams(), st.lists(st.integers(0, 5000), max_size=30))
@example('\ufeffdata: {"choices":[{"text":"\u2028中"}]}\r\n\r\n'.encode(), list(range(60)))
def test_cuts_change_nothing(raw: bytes, places: list[int]) -> None:
    pieces = cut(raw, places)
    assert feed(*pieces) == feed(raw)
    assert facts(list(enumerate(pieces))) == facts([(0, raw)])


@given(streams())
def test_byte_by_byte_changes_nothing(raw: bytes) -> None:
    pieces = [raw[i : i + 1] for i in range(len(raw))]
    assert feed(*pieces) == feed(raw)
    assert facts(list(enumerate(pieces))) == facts([(0, raw)])


@given(streams(), st.lists(st.integers(0, 5000), max_size=30))
def test_stamps_never_go_back(raw: bytes, places: list[int]) -> None:
    got = sse.read(enumerate(cut(raw, places)))
    if got.first_token_ns is not None:
        assert got.first_event_ns is not None
        assert got.first_event_ns <= got.first_token_ns
        assert got.done_ns is None or got.first_token_ns <= got.done_ns


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=10))
def test_any_bytes_are_survived(raw: bytes, places: list[int]) -> None:
    assert feed(*cut(raw, places)) == feed(raw)
    sse.read([(0, b"data: " + raw + b"\n\n")])


@given(st.recursive(st.none() | st.booleans() | st.integers() | TEXT, st.lists, max_leaves=5))
def test_any_json_in_any_place_is_survived(value: Any) -> None:
    for body in (value, {"choices": value}, {"choices": [value]}, {"usage": value}):
        sse.read([(0, b"data: " + json.dumps(body).encode() + b"\n\n")])
    for field in ("text", "delta", "logprobs", "token_ids", "finish_reason", "error"):
        raw = json.dumps(choice(**{field: value})).encode()
        sse.read([(0, b"data: " + raw + b"\n\n")])
    for key in ("tokens", "content", "top_logprobs", "token_logprobs"):
        raw = json.dumps(choice(logprobs={key: value})).encode()
        sse.read([(0, b"data: " + raw + b"\n\n")])
