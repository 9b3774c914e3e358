"""Verdicts on known counts: the floor, the collapse, and training's promise."""

from __future__ import annotations

import pytest

from kitlib.acceptance import Acceptance
from kitlib.diagnose import judge

FLOOR = {
    "features zeroed": Acceptance((tuple([0] * 19 + [1]),) * 8, 4),
    "random drafter": Acceptance(((0,) * 20,) * 8, 4),
}


def codes(rounds, expected=()):
    found = judge(Acceptance(rounds, 4), FLOOR, None, expected)
    return {f.code: (f.status, f.severity) for f in found}


def test_a_drafter_at_the_controls_is_an_error_and_few_prompts_are_not_judged():
    assert codes((tuple([0] * 9 + [1]),) * 8) == {"M201": ("fail", "error")}
    assert codes(((3, 4, 3, 4),) * 2) == {"M201": ("not-run", "info")}
    assert codes(((2, 1, 3, 4),) * 8)["M201"] == ("pass", "info")


@pytest.mark.parametrize(
    ("promised", "status"),
    [((0.9, 0.9, 0.9, 0.9), "pass"), ((0.5, 0.5, 0.5, 0.5), "pass")],
)
def test_training_that_promised_up_to_twice_the_gain_is_no_alarm(promised, status):
    """2.5 accepted drafts a round; 3.1 and 0.94 were promised."""
    assert codes(((2, 1, 3, 4),) * 8, promised)["M203"][0] == status


def test_training_that_promised_far_more_is_a_warning():
    rounds = ((1, 1, 1, 1),) * 8  # above the line of M201, and less than half of 3.1
    assert codes(rounds, (0.9, 0.9, 0.9, 0.9))["M203"] == ("fail", "warning")
    assert codes(rounds, (0.9, 0.5, 0.3, 0.3))["M203"][0] == "pass"


def test_a_dead_second_position_is_an_error():
    rounds = (tuple([1] * 12 + [0] * 4),) * 8
    assert codes(rounds)["M202"] == ("fail", "error")
