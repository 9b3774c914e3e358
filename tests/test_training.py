"""A trainer's accuracies, in the spellings that trainers use, and what they promise."""

from __future__ import annotations

import json

import pytest

from kitlib.findings import KitError
from kitlib.training import read_training, silence

JOINT = (0.7, 0.42, 0.21)
CONDITIONAL = (0.7, 0.6, 0.5)
LENGTH = 1 + sum(JOINT)


@pytest.mark.parametrize(
    ("text", "kind", "values"),
    [
        (json.dumps({f"full_acc_{k}": x for k, x in enumerate(JOINT)}), "joint", JOINT),
        (json.dumps({"val/full_acc_0": 0.1}) + "\n" + json.dumps({f"val/full_acc_{k}": x for k, x in enumerate(JOINT)}),
         "joint", JOINT),
        ("step 10 | cond_acc_0: 0.7000, cond_acc_1: 0.6, cond_acc_2: 0.5, loss_0: 2.1", "conditional", CONDITIONAL),
        ("{'train/acc_0': 0.7, 'train/acc_1': 0.6, 'train/acc_2': 0.5}", "conditional", CONDITIONAL),
        ("train/acc_0=0.70 train/acc_1=0.60 train/acc_2=5e-1", "conditional", CONDITIONAL),
        ("acc_0: tensor(0.7000) acc_1: tensor(0.6) acc_2: tensor(0.5)", "conditional", CONDITIONAL),
        ("epochacc_0: 0.9\nacc_1: 0.7 acc_2: 0.6 acc_3: 0.5", "conditional", CONDITIONAL),  # counted from 1
        (json.dumps({"conditional": CONDITIONAL}), "conditional", CONDITIONAL),
        (json.dumps({"complete": True, "served_conditional": CONDITIONAL, "restricted_conditional": (1, 1, 1)}),
         "conditional", CONDITIONAL),
    ],
)  # fmt: skip
def test_every_spelling_gives_the_same_accept_length(tmp_path, text, kind, values):
    (tmp_path / "log").write_text(text)
    told = read_training(tmp_path / "log")
    assert (told.kind, told.values) == (kind, values)
    assert told.expected() == pytest.approx(LENGTH) and told.expected(1) == pytest.approx(1.7)
    assert told.conditional == pytest.approx(CONDITIONAL) and told.joint == pytest.approx(JOINT)


def test_both_of_speculators_numbers_agree_and_the_joint_one_is_taken(tmp_path):
    both = {f"full_acc_{k}": x for k, x in enumerate(JOINT)} | {f"cond_acc_{k}": x for k, x in enumerate(CONDITIONAL)}
    (tmp_path / "m.json").write_text(json.dumps(both))
    assert read_training(tmp_path / "m.json").kind == "joint"


def test_the_story_from_its_one_number(tmp_path):
    """74.5 % step-0 accuracy promises 1.745 to 3.02, and 40 rounds without any acceptance cannot be training."""
    (tmp_path / "log").write_text("full_acc_0: 0.745")
    low, high = read_training(tmp_path / "log").bracket(4)
    assert low == pytest.approx(1.745) and high == pytest.approx(3.02, abs=0.01)
    assert silence(0.745, 40) < 1e-23


@pytest.mark.parametrize("text", ["", "loss 2.0", "{}", "acc_0: 74.5", "[" * 100000])
def test_what_holds_no_accuracy_is_refused(tmp_path, text):
    (tmp_path / "log").write_text(text)
    with pytest.raises(KitError, match="no accuracies"):
        read_training(tmp_path / "log")
    with pytest.raises(KitError, match="Cannot read"):
        read_training(tmp_path / "absent")


def test_held_out_rows_win_and_sets_are_not_mixed(tmp_path):
    text = "train/cond_acc_0: 0.9 train/cond_acc_1: 0.8\nval/cond_acc_0: 0.5 val/cond_acc_1: 0.4\n"
    (tmp_path / "log").write_text(text + "train/cond_acc_0: 0.95 train/cond_acc_1: 0.9 train/cond_acc_2: 0.9")
    assert read_training(tmp_path / "log").values == (0.5, 0.4)
    (tmp_path / "log").write_text(json.dumps({"full_acc_0": 0.7, "cond_acc_0": 0.7, "cond_acc_1": 0.6}))
    assert read_training(tmp_path / "log").values == (0.7, 0.6)
    (tmp_path / "log").write_text("acc_0: 74.5% acc_1: 60 %")
    assert read_training(tmp_path / "log").values == pytest.approx((0.745, 0.6))
    (tmp_path / "log").write_text("full_acc_0: 0.5 full_acc_1: 0.9")
    with pytest.raises(KitError, match="rise"):
        read_training(tmp_path / "log")
    (tmp_path / "log").write_text("acc_0: 74.5")
    with pytest.raises(KitError, match="percentages"):
        read_training(tmp_path / "log")


def test_long_words_and_numbers_take_no_time(tmp_path):
    (tmp_path / "log").write_text("a" * 2_000_000 + " acc_" + "1" * 5000 + ": 0.5 " + "f" * 100_000)
    with pytest.raises(KitError, match="no accuracies"):
        read_training(tmp_path / "log")
