"""kitlib.logs against real 0.5.20 files (fixtures/sglang-0.5.20) and against other releases' sources, not run."""

from __future__ import annotations

import json
import os
import re
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitlib import logs
from kitlib.engines.rules import Engine

HERE = Path(__file__).parent / "fixtures"
REAL, SOURCE = HERE / "sglang-0.5.20", HERE / "from-source"


def real(name: str):
    return json.loads((REAL / f"{name}.json").read_text())


def source_lines(name: str) -> list[list[str]]:
    header, *lines = (SOURCE / name).read_text().rstrip("\n").split("\n")
    assert header.startswith("# from source, not run")
    return [line.split("\t") for line in lines]


def source_json(name: str) -> dict:
    data = json.loads((SOURCE / name).read_text())
    assert data.pop("header").startswith("from source, not run")
    return data


# --- decode lines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("release", "line"), source_lines("decode-lines.tsv"))
def test_decode_line_of_every_format(release, line):
    row = logs.decode_row(line)
    known = {k: row[k] for k in ("running", "tokens", "usage", "accept_len", "throughput", "queue")}
    assert known == {"running": 2, "tokens": 300, "usage": 0.25, "accept_len": 1.5, "throughput": 100, "queue": 1}
    assert row["graph"] is (None if release in ("0.4.4", "0.4.6") else True)
    assert row["time"].replace(microsecond=0) == datetime(2025, 3, 14, 10)
    formula = Engine.load().entry("rate", release)["formula"]
    if formula == "none":
        assert row["accept_rate"] is None
    else:  # the rate that is printed says the same as the length that is printed, under this release's formula
        assert 1 + logs.invert(formula, row["accept_rate"], D=5, S=4) == pytest.approx(1.5, abs=0.03)


def test_milliseconds_rank_and_the_rest_of_a_line():
    rows = {release: logs.decode_row(line) for release, line in source_lines("decode-lines.tsv")}
    assert rows["0.5.9"]["time"].microsecond == 123000 and rows["0.5.9"]["rank"] == "DP0 TP0 EP0"
    assert rows["0.5.11"]["extra"]["fwd occupancy"] == "97.00%"
    assert rows["0.5.16"]["extra"] == {"cap len": "3.00", "block accept len": "2.00"}


@pytest.mark.parametrize("line", ["", "Decode batch", "[2025-03-14 10:00:00] Prefill batch, #new-seq: 1, #token: 3"])
def test_other_lines_are_no_rows(line):
    assert logs.decode_row(line) is None


def test_a_bad_date_and_bad_numbers_leave_holes():
    row = logs.decode_row("[2025-99-99 10:00:00] Decode batch, #running-req: many, accept len: nan, cuda graph: False")
    assert (row["time"], row["running"], row["accept_len"], row["graph"]) == (None, None, None, False)


# --- a whole log ----------------------------------------------------------------------------------------------------


def test_a_real_healthy_log():
    log = logs.Log.parse((REAL / "eagle3.log").read_bytes())
    kinds = [e.kind for e in log.events]
    assert kinds == [
        "arguments", "loading", "weights loaded", "loading", "weights loaded", "memory allocated", "memory allocated",
        "listening", "health 503", "warm-up", "ready", "health 200", "dying",
    ]  # fmt: skip
    times = [e.time for e in log.events]
    assert times == sorted(times) and None not in times
    assert "LlamaForCausalLMEagle3" in [e for e in log.events if e.kind == "weights loaded"][1].text
    assert len(log.rows) == 24
    for row in log.rows:  # the strict rate of >= 0.5.11, D = 5, both numbers rounded to 0.01
        assert 1 + 4 * row["accept_rate"] == pytest.approx(row["accept_len"], abs=0.026)
    assert any("Overlap schedule is not implemented" in w.text for w in log.warnings)
    assert [e.kind for e in log.errors] == ["error"] and "exit code -15" in log.errors[0].text
    assert logs.reason((REAL / "eagle3.log").read_bytes()) == ("", "")
    has = logs.speculation(log.flags)
    assert (has.on, has.algorithm, has.steps, has.topk, has.draft_tokens) == (True, "EAGLE3", 4, 1, 5)


def test_a_real_log_under_eagle_shows_the_floor_and_not_one_error():
    log = logs.Log.parse((REAL / "eagle.log").read_bytes())
    assert logs.speculation(log.flags).algorithm == "EAGLE"
    assert max(r["accept_len"] for r in log.rows) < 2 and not any(e.kind == "exception" for e in log.errors)


def test_a_log_from_source_with_options_in_call_form():
    log = logs.Log.parse((SOURCE / "sglang-0.4.6.log").read_text())
    assert [e.kind for e in log.events] == [
        "arguments", "loading", "weights loaded", "memory allocated", "capturing graphs", "graphs captured",
        "capturing graphs", "graphs captured", "listening", "warm-up", "ready",
    ]  # fmt: skip
    assert log.events[-1].time == datetime(2025, 5, 2, 16, 27, 9)
    assert log.flags["api_key"] == "…" and "sk-not-a-real-key" not in repr(log)
    assert logs.speculation(log.flags).topk == 4
    assert [r["rank"] for r in log.rows] == ["TP0", "DP1 TP0"]


def test_options_that_hold_an_object_are_still_read():
    line = "[2025-01-01 00:00:00] server_args=ServerArgs(mode=<Mode.A: 1>, speculative_num_steps=3, x=[1, {'a': 2}])"
    assert logs.flags(line) == {"mode": None, "speculative_num_steps": 3, "x": [1, {"a": 2}]}
    assert logs.flags("server_args=ServerArgs(") == {} and logs.flags("server_args={1: ") == {}


def test_secrets_never_survive():
    text = (
        "server_args={'api_key': 'abcdef', 'ssl_keyfile_password': 'p4ss', 'hf_token': 'zzz', 'max_total_tokens': 5,"
        " 'x': {'y': 'hf_abcdefghijkl'}, 'launch_command': '--api-key abcdef --port 1', 'tokenizer_path': './t'}\n"
        "ERROR: Authorization: Bearer abcdef refused for https://me:p4ss@host/ with --api-key=abcdef\n"
        "Traceback (most recent call last):\n  File \"a\", line 1\n    api_key='abcdef'\nValueError: password: p4ss\n"
    )
    log = logs.Log.parse(text)
    assert not re.search("abcdef|p4ss|zzz", repr(log))
    assert (log.flags["max_total_tokens"], log.flags["tokenizer_path"]) == (5, "./t")
    assert len(log.errors) == 2


# --- why a server died ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(REAL.glob("died-*.log")), ids=lambda p: p.stem)
def test_reason_of_real_deaths(path):
    kind, sentence = logs.reason(path.read_bytes())
    assert path.stem.startswith(f"died-{kind}-") and "\n" not in sentence and "{" not in sentence


@pytest.mark.parametrize(("release", "kind", "text"), source_lines("deaths.txt"))
def test_reason_of_deaths_from_source(release, kind, text):
    assert logs.reason(text.replace("\\n", "\n"))[0] == kind


def test_the_sentences_name_what_was_wrong():
    told = {p.stem.rpartition("-")[2]: logs.reason(p.read_bytes())[1] for p in REAL.glob("died-*.log")}
    assert "torch_native" in told["noamx"] and "EAGLE4" in told["choice"] and "./no-such-drafter" in told["nopath"]
    assert "LlamaForCausalLMEagle9" in told["arch"] and "1728x576" in told["ids"]
    assert "speculative_hook.py" in told["topk"]  # a bare AssertionError: its place is all there is


def test_reasons_without_a_known_error():
    assert logs.reason("")[0] == "unknown"
    assert logs.reason("[2025-01-01 00:00:00] Load weight begin.")[1].endswith("'Load weight begin.'")
    broken = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\nZeroDivisionError: division by zero'
    assert logs.reason(broken) == ("other", "it stopped with ZeroDivisionError: division by zero")
    assert logs.reason('Traceback (most recent call last):\n  File "x.py", line 1, in f\n    g()')[0] == "other"


# --- a growing file -------------------------------------------------------------------------------------------------


def test_tail_follows_a_file_that_grows_is_truncated_and_rotated(tmp_path):
    path = tmp_path / "server.log"
    tail = logs.Tail(path)
    assert tail.read() == []  # not there yet
    path.write_bytes(b"one\ntw")
    assert tail.read() == ["one"]
    with path.open("ab") as file:
        file.write("o €".encode()[:-1])  # half a character as well
    assert tail.read() == []
    with path.open("ab") as file:
        file.write("€".encode()[-1:] + b"\n\xff\xfe\n")
    assert tail.read() == ["two €", "��"]
    path.write_bytes(b"new\n")  # truncated in place
    assert tail.read() == ["new"]
    with path.open("ab") as file:
        file.write(b"last of the old")
    path.rename(tmp_path / "server.log.1")
    path.write_bytes(b"first of the new\nunfinished")
    assert tail.read() == ["last of the old", "first of the new"]
    assert tail.read(final=True) == ["unfinished"]


def test_tail_of_a_removed_file_keeps_what_it_has(tmp_path):
    path = tmp_path / "server.log"
    path.write_bytes(b"a\nb")
    tail = logs.Tail(path)
    assert tail.read() == ["a"]
    os.unlink(path)
    assert tail.read() == [] and tail.read(final=True) == ["b"] and tail.read() == []


def test_lines_fed_one_by_one_give_the_same_log(tmp_path):
    data = (REAL / "eagle3.log").read_bytes()
    path, log = tmp_path / "server.log", logs.Log()
    tail = logs.Tail(path)
    with path.open("wb") as file:
        for start in range(0, len(data), 997):
            file.write(data[start : start + 997])
            file.flush()
            for line in tail.read():
                log.feed(line)
    for line in tail.read(final=True):
        log.feed(line)
    log.close()
    assert log == logs.Log.parse(data)


# --- counts ---------------------------------------------------------------------------------------------------------


def test_counts_of_a_real_request():
    counts = logs.request_counts(real("generate"), "0.5.20", S=3)
    assert (counts.v, counts.a, counts.D, counts.S, counts.histogram) == (18, 31, 4, 3, (6, 2, 1, 9))
    assert counts.accept_length == 1 + 31 / 18 and counts.caveat == ""
    assert counts.overrun == 2  # 1 + 18 + 31 tokens were produced, 48 were asked for


def test_counts_of_real_batch_and_chat_answers():
    batch = [logs.request_counts(b, "0.5.20") for b in real("generate-batch")]
    assert [(c.v, c.a) for c in batch] == [(12, 21), (11, 22), (13, 21)]
    chat = logs.request_counts(real("chat-meta"), "0.5.20")
    assert (chat.v, chat.a, chat.histogram, chat.overrun) == (7, 10, (3, 1, 0, 3), 2)
    extension = {"sglext": {"spec_tokens_details": [{"spec_verify_ct": 7, "spec_num_correct_drafts": 10}]}}
    assert logs.request_counts(extension | {"usage": {"completion_tokens": 16}}, "0.5.20").overrun == 2


@pytest.mark.parametrize("name", ["generate-plain", "completions"])
def test_an_answer_without_speculative_fields_says_so(name):
    counts = logs.request_counts(real(name), "0.5.20")
    assert counts.accept_length is None and "no verify round" in counts.caveat


@pytest.mark.parametrize(("release", "meta"), source_json("meta-info.json").items())
@pytest.mark.parametrize("told", [True, False])
def test_counts_under_all_historical_names(release, meta, told):
    counts = logs.request_counts({"meta_info": meta}, release if told else "", D=5, S=4)
    assert (counts.v, counts.a, counts.accept_length) == (20, 12, 1.6)
    assert counts.histogram == ((12, 5, 2, 1) if release in ("0.5.9", "0.5.11", "0.5.21") else ())
    if told and release in ("0.4.6", "0.5.3"):
        assert "completion_tokens - 1 - v" in counts.caveat
    elif told and release in ("0.5.4", "0.5.5"):
        assert counts.caveat.endswith("a inverted from spec_accept_rate = a/(v*S)")
    elif told:
        assert counts.caveat == "" and counts.overrun == 2


def test_where_the_steps_are_unknown_the_rate_cannot_be_inverted():
    counts = logs.request_counts(source_json("meta-info.json")["0.5.5"], "0.5.5")
    assert counts.a == 31 - 1 - 20 and "missing" in counts.caveat


def test_contradictions_and_wrong_types():
    meta = {"spec_verify_ct": 4, "spec_num_correct_drafts": 3, "spec_correct_drafts_histogram": [1, 1]}
    assert "contradicts" in logs.request_counts(meta, "0.5.20").caveat
    wrong = {"spec_verify_ct": "4", "spec_num_correct_drafts": -1, "completion_tokens": True}
    assert logs.request_counts(wrong, "0.5.20").v is None
    zero = logs.request_counts({"spec_accept_rate": 0.0, "spec_accept_length": 0, "spec_verify_ct": 0}, "0.5.5")
    assert (zero.v, zero.a, zero.accept_length) == (0, 0, None)
    assert "0.0.0.dev0" in logs.request_counts(meta, "0.0.0.dev0").caveat


@pytest.mark.parametrize("formula", ["(a+v)/(v*(S+1))", "(a+v)/(v*D)", "a/(v*(D-1))", "a/(v*S)"])
def test_invert_undoes_every_formula(formula):
    rate = eval(formula, {"a": 12, "v": 20, "D": 5, "S": 4})  # one of the strings above
    assert logs.invert(formula, rate, D=5, S=4) == pytest.approx(12 / 20)
    assert logs.invert(formula, rate, D=None, S=None) is None and logs.invert("none", rate, 5, 4) is None


def test_real_server_info():
    has = logs.speculation(real("server-info"))
    assert (has.on, has.algorithm, has.steps, has.draft_tokens, has.release) == (True, "EAGLE3", 3, 4, "0.5.20")
    counts = logs.server_counts(real("server-info"))
    assert counts.accept_length == pytest.approx(2.662251655629139) and (counts.v, counts.a) == (None, None)
    assert "average since start" in counts.caveat
    off = logs.speculation(real("server-info-plain"))
    assert off.on is False and off.algorithm == ""
    assert "absent" in logs.server_counts(real("server-info-plain")).caveat
    assert logs.speculation({}).on is None


def test_server_info_in_both_places():
    old, newer = source_json("server-info.json").values()
    assert logs.server_counts(old).accept_length == 1.6 and logs.speculation(old).threshold_single == 0.9
    assert logs.server_counts(newer).accept_length == 1.6 and logs.speculation(newer).threshold_acc == 0.5
    assert [Engine.load().entry("server_info", r)["place"] for r in ("0.4.6", "0.5.3")] == ["", "internal_states"]


def test_real_metrics():
    counts = logs.metrics_counts((REAL / "metrics.txt").read_bytes(), "0.5.20")
    assert (counts.v, counts.a, counts.D, counts.S, counts.accept_length) == (151, None, 4, 3, 4.0)
    idle = '# TYPE sglang:spec_accept_length gauge\nsglang:spec_accept_length{tp_rank="0"} 0.0\n'
    assert logs.metrics_counts(idle, "0.5.3").accept_length is None
    assert "malformed" in logs.metrics_counts("sglang:spec_accept_length{ nope", "0.5.3").caveat


# --- the data and arbitrary input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["meta", "server_info", "prometheus"])
def test_every_release_has_exactly_one_row(table):
    for release in Engine.load().releases:
        assert len(Engine.load().entries(table, release)) == 1, (table, release)


def test_patterns_compile_sentences_fit_and_sources_are_named():
    data = Engine.load().data
    for row in [*data["death"], *data["stamp"]]:
        groups = re.compile(row["pattern"]).groupindex
        re.compile(row.get("frames", ""))
        assert row["source"] and row.get("says", "x").format(text="", **dict.fromkeys(groups, ""))
    kinds = {"out-of-memory", "capture-hook", "shape", "attention-backend", "port-in-use", "draft-path", "model-path"}
    assert {r["kind"] for r in data["death"]} == kinds | {"unknown-architecture", "refused-config"}


WORDS = [
    "Decode batch", ", #token: 1", "[2025-01-01 00:00:00] ", "\n", "\r", "Traceback (most recent call last)", " ", "} ",
    "server_args=", "{'a': ", "ServerArgs(", "\x1b[0m", "ValueError: ", "ERROR", "sglang:spec_accept_length{",
    "api_key=",
]  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["meta_info", "choices", "sglext", "spec_tokens_details", "spec_verify_ct",
        "spec_accept_rate", "spec_num_correct_drafts", "spec_correct_drafts_histogram", "completion_tokens", "usage",
        "internal_states", "avg_spec_accept_length", "speculative_algorithm", "version"]), inner, max_size=6),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400) | st.lists(st.sampled_from(WORDS) | st.text(max_size=4)).map("".join))
def test_arbitrary_text_never_raises(data):
    kind, sentence = logs.reason(data)
    assert bool(kind) == bool(sentence)
    assert isinstance(logs.metrics_counts(data), logs.Counts)
    text = data.decode("utf-8", "replace") if isinstance(data, bytes) else data
    assert isinstance(logs.flags(text), dict) and logs.redact(logs.redact(text)) == logs.redact(text)


@settings(max_examples=100, deadline=None)
@given(JSON, st.sampled_from(["", "0.4.6", "0.5.5", "0.5.9", "0.5.20", "junk"]))
def test_arbitrary_answers_never_raise(body, release):
    counts = logs.request_counts(body, release, D=5, S=4)
    assert counts.accept_length is None or counts.accept_length >= 1
    assert isinstance(logs.server_counts(body), logs.Counts)


def test_fixtures_hold_no_machine_path():
    for path in (p for p in HERE.rglob("*") if p.is_file()):
        assert not re.search(r"/(tmp|work|root|home)/", path.read_bytes().decode("utf-8", "replace")), path
