"""Stored hidden states: every layout replays as the loaded target does; what cannot be used is left out and told."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from tiny import DRAFT_VOCAB, VOCAB, contract_of, write_drafter, write_target
from verified import write_table

from kitlib.__main__ import main
from kitlib.acceptance import draft_everywhere, replay
from kitlib.diagnose import Session, measure
from kitlib.dumps import Dump, StoredSession, write
from kitlib.features import States, Target, Text
from kitlib.findings import KitError

AUX, LAST = (2, 4, 5), 8


@pytest.fixture(scope="module")
def session(tmp_path_factory) -> Session:
    """A tiny pair whose final norm has weights of its own; the drafter stores its embedding, and no layer ids."""
    from transformers import AutoModelForCausalLM

    from kitlib.contract import TargetInfo

    folder = write_target(tmp_path_factory.mktemp("target"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    often = torch.tensor([4, 6, 8, 10])  # tokens that both prefer, so that some drafts are right
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.rand(32, generator=generator) + 0.3)
        model.lm_head.weight.mul_(0.05).index_copy_(0, often, torch.randn(4, 32, generator=generator))
    model.save_pretrained(folder)
    own = {"embed_tokens.weight": torch.randn(VOCAB, 32, generator=generator)}
    own["lm_head.weight"] = 0.05 * torch.randn(DRAFT_VOCAB, 32, generator=generator)
    own["lm_head.weight"].index_copy_(0, often // 2, torch.randn(4, 32, generator=generator))
    drafter = write_drafter(tmp_path_factory.mktemp("pair") / "d", rope_theta=5e5, extra=own)
    checkpoint, contract, _ = contract_of(drafter, folder)
    target = Target(model, None, TargetInfo.of(folder))
    prompts = [tuple(torch.randint(3, VOCAB, (6,), generator=generator).tolist()) for _ in range(8)]
    return Session(checkpoint, contract, target, target.record(prompts, 40, 5), 4)


@pytest.fixture(scope="module")
def states(session) -> list[States]:
    return [session.target.states(text, (*AUX, LAST)) for text in session.texts]


def save_as(layout: str, folder, states) -> None:
    """The files of one layout, as its trainer's own code writes them."""
    folder.mkdir(exist_ok=True)
    for i, one in enumerate(states):
        ids, text = torch.tensor(one.text.ids), one.text
        mask = torch.zeros_like(ids)
        mask[text.prompt : text.prompt + text.limit] = 1
        aux, raw = [one.boundaries[b] for b in AUX], one.boundaries[LAST]
        common, joined = {"input_ids": ids, "loss_mask": mask}, torch.cat(aux, -1)
        if layout == "speculators v0":
            torch.save(common | {"hidden_state": joined, "target": one.final}, folder / f"data_{i}.pt")
        elif layout == "speculators v1":  # its mask comes as the list of a data set's row
            kept = {"input_ids": ids, "hidden_states": [*aux, raw], "loss_mask": mask.tolist()}
            torch.save(kept, folder / f"data_{i}.pt")
        elif layout == "SpecForge":
            (rows := folder / "rows_0-5000").mkdir(exist_ok=True)
            kept = common | {"hidden_state": one.final[None], "aux_hidden_state": joined[None]}
            torch.save(kept, buffer := io.BytesIO())
            packed = gzip.compress(buffer.getvalue()) if i % 2 else buffer.getvalue()
            (rows / f"data_{i}.ckpt{'.gz' * (i % 2)}").write_bytes(packed)
        else:  # the mask is in the data set, not here
            kept = {"token_ids": ids, "hidden_states": torch.stack([*aux, raw], 1)}
            save_file(kept, folder / f"hs_{i}.safetensors")


def stored(session, folder, target=True, **options) -> StoredSession:
    path = session.target.info.path if target else ""
    return StoredSession.open(session.checkpoint.path, folder, path, device="cpu", dtype="float32", **options)


@pytest.mark.parametrize("layout", ["speculators v0", "speculators v1", "SpecForge", "kitlib"])
def test_each_layout_accepts_what_the_loaded_target_does(session, states, tmp_path, layout):
    folder, expected = tmp_path / "dump", session.measure()
    assert expected.accepted > 10  # else the comparison would be of zeros
    if layout == "kitlib":
        write(folder, iter(states))
        given = ""
    else:
        save_as(layout, folder, states)
        given = "2, 4, 5"
    one = stored(session, folder, boundaries=given)
    assert one.measure().rounds == expected.rounds
    assert {n: a.rounds for n, a in one.controls().items()} == {n: a.rounds for n, a in session.controls().items()}
    final = session.trained.but(capture="final", fc=False)
    assert one.measure(final).rounds == session.measure(final).rounds
    about = one.told(measure(one)).extra["features"]
    assert about["kind"] == layout and about["used"] == 8 and not about["skipped"] and about["dtype"] == "float32"
    assert about["last_state"] == ("pre-norm" if layout == "speculators v1" else "post-norm")
    assert about["judged_by"].startswith("the target's greedy choices") and about["off_record"] == 0
    assert about["boundaries"] == ([2, 4, 5, 8] if layout == "kitlib" else [2, 4, 5])


def test_without_a_target_the_recorded_text_judges(session, states, tmp_path):
    save_as("speculators v1", tmp_path / "dump", states)
    one = stored(session, tmp_path / "dump", target=False, boundaries="2,4,5,8")
    drafter, _ = session.load()
    texts = [Text(t.ids[: t.prompt + t.limit], t.prompt, t.limit) for t in session.texts]  # no lookahead
    kept = [States(t, s.boundaries, {}, s.final) for t, s in zip(texts, states, strict=True)]
    assert one.measure().rounds == replay(drafter, kept, 4).rounds
    assert one.judged_by == "the recorded text, as no target was named"
    with pytest.raises(KitError, match="final states, which the dump does not hold"):
        one.measure(one.trained.but(capture="final", fc=False))


def test_a_last_state_that_is_not_what_its_layout_says_is_measured(session, states, tmp_path):
    swapped = [States(s.text, s.boundaries | {LAST: s.final}, {}, s.final) for s in states]
    save_as("speculators v1", tmp_path / "dump", swapped)
    one = stored(session, tmp_path / "dump", boundaries="2,4,5")
    assert one.dump.norm == "post-norm" and "speculators v1 says pre-norm" in one.dump.norm_source
    assert one.measure().rounds == session.measure().rounds


def rounds_by_hand(drafts, ids, choice, start, end, steps):
    """Rounds along a recorded text, one draft at a time: drafts[t] follow token t + 1, choice[t] follows token t."""
    rounds, newest = [], start
    while newest < end - 1:
        accepted, at = 0, newest + 1  # at: the token that is drafted next
        while accepted < steps and at <= len(ids) and drafts[newest - 1][accepted] == choice[at - 1]:
            accepted, at = accepted + 1, at + 1
            if at > len(ids) or ids[at - 1] != choice[at - 2]:
                break
        if at > len(ids) and accepted < steps:
            break  # the record ends inside the round
        rounds.append(accepted)
        off = accepted and ids[at - 1] != choice[at - 2]  # the accepted token is not the recorded one
        newest = at - 1 if off else at
    return tuple(rounds)


def test_a_text_that_the_target_would_not_write_is_judged_token_by_token(session, tmp_path):
    generator, drafter = torch.Generator().manual_seed(9), session.load()[0]
    made, expected = [], []
    for text in session.texts:
        ids = torch.tensor(text.ids)
        other = torch.rand(len(ids), generator=generator) < 0.25
        ids[other] = torch.randint(3, VOCAB, (int(other.sum()),), generator=generator)
        made.append(session.target.states(Text(tuple(ids.tolist()), 6, len(ids) - 9), (*AUX, LAST)))
        choice = (made[-1].final @ session.target.head.T).argmax(-1).tolist()
        drafts = draft_everywhere(drafter, made[-1].select(session.trained), ids, 4).tolist()
        expected.append(rounds_by_hand(drafts, ids.tolist(), choice, 6, len(ids) - 3, 4))
    save_as("speculators v1", tmp_path / "dump", made)
    one = stored(session, tmp_path / "dump", boundaries="2,4,5")
    assert one.measure().rounds == tuple(expected) and one.measure().accepted > 10
    assert one.counts["off_record"] > 20 and 0 < one.counts["cut_rounds"] <= one.counts["off_record"]


def test_several_answers_in_one_sample_count_for_one_prompt(session, states, tmp_path):
    one = states[0]
    ids, end = torch.tensor(one.text.ids), one.text.prompt + one.text.limit
    mask = torch.zeros_like(ids)
    mask[one.text.prompt : 20], mask[26:end] = 1, 1
    kept = {"input_ids": ids, "hidden_states": [one.boundaries[b] for b in (*AUX, LAST)], "loss_mask": mask}
    (tmp_path / "dump").mkdir()
    torch.save(kept, tmp_path / "dump" / "data_0.pt")
    got = stored(session, tmp_path / "dump", boundaries="2,4,5").measure()
    drafter, parts = session.load()[0], []
    for start, stop in ((one.text.prompt, 20), (26, end)):
        parts += replay(
            drafter, [States(Text(one.text.ids, start, stop - start), one.boundaries, {}, one.final)], 4
        ).rounds[0]
    assert got.rounds == (tuple(parts),)


class Exploit:
    """Runs a command when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def test_what_cannot_be_used_is_left_out_with_its_reason(session, states, tmp_path, capsys):
    folder, mark = tmp_path / "dump", tmp_path / "executed"
    save_as("speculators v1", folder, states)
    sample = torch.load(folder / "data_0.pt", weights_only=True)
    whole = (folder / "data_0.pt").read_bytes()
    (folder / "cut.pt").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.pt").write_bytes(b"")
    torch.save({"weight": torch.ones(2)}, folder / "foreign.pt")
    torch.save(sample | {"loss_mask": Exploit(mark)}, folder / "hostile.pt")
    (folder / "pickled.pt").write_bytes(pickle.dumps(Exploit(mark)))
    save_file({"model.norm.weight": torch.ones(2)}, folder / "model.safetensors")
    (folder / "cut.safetensors").write_bytes(b"\x20\0\0\0\0\0\0\0{}")
    torch.save(sample | {"hidden_states": [s.clone() for s in sample["hidden_states"][1:]]}, folder / "fewer.pt")
    torch.save(sample | {"hidden_states": [s * float("nan") for s in sample["hidden_states"]]}, folder / "nan.pt")
    torch.save(sample | {"input_ids": sample["input_ids"][:-1]}, folder / "short.pt")
    torch.save(sample | {"input_ids": sample["input_ids"] + VOCAB}, folder / "vocabulary.pt")
    torch.save(sample | {"loss_mask": [0] * len(sample["loss_mask"])}, folder / "unmarked.pt")
    torch.save(sample | {"hidden_states": "text"}, folder / "text.pt")
    torch.save(sample | {"hidden_states": [torch.ones(1, 1).expand(51, 32)] * 4}, folder / "stretched.pt")
    command = ["measure", str(session.checkpoint.path), "--features", str(folder), "--boundaries", "2,4,5", "--json"]
    code = main([*command, "--target", str(session.target.info.path), "--device", "cpu", "--dtype", "float32"])
    out = json.loads(capsys.readouterr().out)
    about = out["features"]
    why = {row["file"]: row["reason"] for row in about["skipped"]}
    assert not mark.exists() and code in (0, 1) and about["used"] == 8
    assert why["empty.pt"] == "is empty" and "truncated" in why["cut.pt"] and "truncated" in why["cut.safetensors"]
    assert why["foreign.pt"] == "is no sample of hidden states: it holds weight"
    assert why["model.safetensors"] == "is no sample of hidden states: it holds model.norm.weight"
    assert "system, which no sample needs; it was not run" in why["hostile.pt"] and "pickled.pt" in why
    assert "another kind (speculators v1, 2 + 1 states" in why["fewer.pt"] and "finite" in why["nan.pt"]
    assert "tokens and a states of" in why["short.pt"] and "ids up to" in why["vocabulary.pt"]
    assert "mask is empty" in why["unmarked.pt"] and "shapes" in why["text.pt"] and "stretched.pt" in why
    assert len(why) == 14
    assert tuple(out["acceptance"]["histogram"]) == tuple(session.measure().histogram)
    left = next(n for n in out["not_run"] if n["slug"] == "features-skipped")
    assert left["reason"].startswith("14 files left out: cut.pt is truncated")


def test_nobody_says_the_boundaries(session, states, tmp_path, capsys):
    save_as("speculators v1", folder := tmp_path / "dump", states)
    command = ["measure", str(session.checkpoint.path), "--features", str(folder)]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "give --boundaries, such as 2,15,27" in said and "3 states" in said
    assert main([*command, "--boundaries", "2,4"]) == 2
    assert "--boundaries says boundaries [2, 4]" in capsys.readouterr().err
    assert main([*command, "--boundaries", "2,4;5"]) == 2 and "whole numbers" in capsys.readouterr().err


def test_the_dump_or_the_drafter_says_the_boundaries(session, states, tmp_path):
    save_as("speculators v1", folder := tmp_path / "dump", states)
    told = {"speculators_version": "0.3.0", "hidden_states": {"layer_ids": [4, 1, 3, 7]}}
    (folder / "data_config.json").write_text(json.dumps(told))
    one = stored(session, folder)
    assert one.dump.boundaries == (2, 4, 5) and one.dump.last == 8 and "after layers [1, 3, 4, 7]" in one.dump.source
    assert one.measure().rounds == session.measure().rounds
    named = write_drafter(tmp_path / "named", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]})
    shifted = {"speculators_version": "0.3.0", "hidden_states": {"layer_ids": [2, 4, 5, 7]}}
    (folder / "data_config.json").write_text(json.dumps(shifted))  # the trap of 0.3.0: one layer later
    with pytest.raises(KitError, match=r"boundaries \[2, 4\]; the dump holds \[3, 5, 6, 8\]"):
        StoredSession.open(named, folder, session.target.info.path, dtype="float32").measure()
    assert stored(session, folder).trained.boundaries == (3, 5, 6)  # a drafter without ids reads what it was fed
    (folder / "data_config.json").write_text(json.dumps(told | {"speculators_version": "1.0"}))
    with pytest.raises(KitError, match=r"speculators 1\.0, of which the kit does not know"):
        stored(session, folder)
    (folder / "data_config.json").unlink()
    one = StoredSession.open(named, folder, session.target.info.path, dtype="float32")
    assert one.dump.boundaries == (2, 4, 5) and "the dump itself says nothing" in one.dump.source


def test_a_last_state_of_another_layer_is_not_taken_for_the_final_one(session, states, tmp_path):
    save_as("speculators v1", folder := tmp_path / "dump", states)
    one = stored(session, folder, boundaries="2,4,5,7")
    assert (
        one.judged_by == "the recorded text, as the dump's last state is that of boundary 7, not of the last layer (8)"
    )


def test_hidden_states_of_later_speculators_have_no_mask(session, states, tmp_path):
    save_as("speculators 0.5+", tmp_path / "new", states)
    unmasked = [States(Text(s.text.ids, 1, len(s.text.ids) - 1), s.boundaries, {}, s.final) for s in states]
    save_as("speculators v1", tmp_path / "old", unmasked)
    new, old = (stored(session, tmp_path / name, boundaries="2,4,5,8") for name in ("new", "old"))
    assert new.measure().rounds == old.measure().rounds and new.dump.norm == "pre-norm"


def test_the_writer_never_overwrites_and_leaves_no_half(states, tmp_path):
    def broken():
        yield states[0]
        raise RuntimeError("the target died")

    with pytest.raises(RuntimeError):
        write(tmp_path / "dump", broken())
    assert not list(tmp_path.iterdir())
    write(tmp_path / "dump", states)
    before = {f.name: f.read_bytes() for f in (tmp_path / "dump").iterdir()}
    with pytest.raises(KitError, match="never overwritten"):
        write(tmp_path / "dump", states[:1])
    assert {f.name: f.read_bytes() for f in (tmp_path / "dump").iterdir()} == before and len(before) == 8
    samples = list(Dump.open(tmp_path / "dump").samples(VOCAB))
    for sample, one in zip(samples, states, strict=True):
        assert tuple(sample.ids.tolist()) == one.text.ids and torch.equal(sample.last, one.final)
        assert torch.equal(sample.aux[1], one.boundaries[4]) and sample.answers[0][0] == one.text.prompt


def test_folders_that_hold_no_dump_are_refused_in_a_sentence(session, tmp_path):
    (tmp_path / "bad.pt").write_bytes(b"")
    for folder, why in (
        (tmp_path / "x", "There is nothing at"),
        (tmp_path, "None of the 1 files"),
    ):
        with pytest.raises(KitError, match=why):
            stored(session, folder, boundaries="2,4,5")
    (tmp_path / "bad.pt").unlink()
    with pytest.raises(KitError, match="holds no hidden states"):
        stored(session, tmp_path)


MEMORY = """
import json, resource, sys
from kitlib.dumps import StoredSession
s = StoredSession.open(*sys.argv[1:4], boundaries=sys.argv[5], dtype="float32", device="cpu", count=int(sys.argv[4]))
a = s.measure()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"used": s.dump.used, "rounds": a.verified, "peak": peak}))
"""


@pytest.mark.verify
def test_memory_does_not_grow_with_the_number_of_samples(session, tmp_path):
    """Peak resident memory of a replay of 1,000 sequences against 100, in a process of its own each."""
    generator, length, rows = torch.Generator().manual_seed(1), 448, []
    texts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for _ in range(1000)]
    made = lambda: (session.target.states(Text(tuple(t), length - 64, 60), (*AUX, LAST)) for t in texts)  # noqa: E731
    for layout in ("speculators v1", "kitlib"):
        folder = tmp_path / layout.replace(" ", "-")
        write(folder, made()) if layout == "kitlib" else save_as(layout, folder, made())
        size = sum(f.stat().st_size for f in folder.iterdir()) / 1e6
        peaks = []
        for count in (100, 1000):
            given = "" if layout == "kitlib" else "2,4,5"  # the kit's own files say their boundaries
            pair = [session.checkpoint.path, folder, session.target.info.path]
            command = [sys.executable, "-c", MEMORY, *pair, count, given]
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            got = json.loads(done.stdout.splitlines()[-1])
            assert got["used"] == count
            peaks.append(got["peak"])
            rows.append([layout, count, f"{size * count / 1000:.0f}", got["rounds"], f"{got['peak']:.0f}"])
        assert peaks[1] - peaks[0] < 0.1 * size * 0.9, (peaks, size)  # a tenth of what the other 900 files hold
    write_table(
        "dumps",
        "Replay of stored hidden states: memory against the number of samples",
        "pytest -m verify tests/test_dumps.py",
        f"Sequences of {length} tokens of the tiny pair of `tests/tiny.py`; the drafter and both controls, 4 draft "
        "steps. Peak memory is that of the whole process (`ru_maxrss`, pages of mapped files included).",
        ["layout", "sequences", "MB on disk", "rounds", "peak memory, MiB"],
        rows,
    )
