"""Training rows as token ids with a loss mask, and what a server renders in their place."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..features import Text
from ..findings import KitError, read_bounded

MOST = 256 << 20  # bytes of a file of rows, unpacked
AROUND, FEW = 8, 3  # tokens shown on each side of a difference; rows from which a template can be told
THINK = re.compile(r"<[|/]*(think|thought|begin_of_thought|end_of_thought|reasoning)|◁/?think", re.I)
USER, ANSWER, AGAIN = "Q7f3a", "A7f3a", "R7f3a"  # contents whose places in a rendered template are looked for


@dataclass(frozen=True)
class Row:
    """One training row."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]  # 1 where the token is trained on
    messages: tuple[dict, ...] = ()  # the conversation it was made from, where the file tells it

    @property
    def prompt(self) -> int:
        """Tokens before the first one that is trained on."""
        return self.mask.index(1) if 1 in self.mask else len(self.ids)

    @property
    def text(self) -> Text:
        return Text(self.ids, self.prompt, len(self.ids) - self.prompt)

    def cut(self, tokens: int) -> Row:
        """The row up to so many tokens of its answer."""
        end = self.prompt + tokens
        return Row(self.ids[:end], self.mask[:end], self.messages)


@dataclass(frozen=True)
class Difference:
    """Where a row and the served prompt part: `at` counts tokens; both texts stand around the place."""

    row: int
    at: int
    kind: str
    trained: str
    served: str


def read_rows(path: str | Path, count: int = 0) -> list[Row]:
    """Rows of a JSONL file, gzipped or not; 0 takes all.

    A line holds {"ids" or "input_ids": […]} with "loss_mask" or "prompt_tokens", and "messages" if it has them.
    """
    data, number, rows = read_bounded(path, MOST, "the training rows"), 0, []
    try:
        if data[:2] == b"\x1f\x8b":
            with gzip.open(path) as file:
                data = file.read(MOST)
        for line in data.decode().split("\n"):
            number += 1
            if line.strip():
                rows.append(as_row(json.loads(line)))
            if count and len(rows) == count:
                break
    except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        wanted = '{"input_ids": […], "loss_mask": […]} or {"ids": […], "prompt_tokens": n}'
        raise KitError(f"{path}, line {number}, is no training row ({str(error)[:80]}); it takes {wanted}.") from None
    if not rows:
        raise KitError(f"{path} holds no training rows.")
    return rows


def as_row(raw: dict[str, Any]) -> Row:
    """A row from its JSON form; ValueError or KeyError where it is none."""
    ids = raw["ids"] if "ids" in raw else raw["input_ids"]
    mask = raw.get("loss_mask")
    if mask is None:
        mask = [0] * raw["prompt_tokens"] + [1] * (len(ids) - raw["prompt_tokens"])
    if any(type(i) is not int or i < 0 for i in ids) or len(mask) != len(ids):
        raise ValueError("ids are whole numbers, and the mask is as long as they are")
    said = tuple(raw.get("messages") or ())
    if not all(isinstance(m.get(k), str) for m in said for k in ("role", "content")):
        said = ()
    return Row(tuple(ids), tuple(int(bool(m)) for m in mask), said)


class Rendering:
    """What a server makes of a conversation: the tokenizer's chat template, or `ask` (messages -> ids) instead.

    KitError where the template is absent or fails.
    """

    def __init__(self, tokenizer, ask: Callable[[Sequence[dict]], Sequence[int]] | None = None):
        if not getattr(tokenizer, "chat_template", None):
            raise KitError("The target's tokenizer has no chat template; give the ids that the server renders.")
        self.tokenizer, self.ask = tokenizer, ask
        turns = [{"role": r, "content": c} for r, c in (("user", USER), ("assistant", ANSWER), ("user", AGAIN))]
        self.head, _, tail = self.template(turns[:1], False).partition(USER)
        self.closing = tail
        between = self.template(turns, False).partition(ANSWER)[2].partition(AGAIN)[0]
        common = _common(between[::-1], self.head[::-1])
        self.opening = between[len(between) - common :].removeprefix(tail)
        self.generation = self.template(turns[:1], True)[len(self.head + USER + tail) :]

    def template(self, messages: Sequence[dict], generation: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation)
        except Exception as error:  # templates are programs
            raise KitError(f"The target's chat template cannot be applied ({str(error)[:120]}); repair it.") from None

    def ids(self, messages: Sequence[dict]) -> tuple[int, ...]:
        """Token ids of the prompt as it is served."""
        if self.ask:
            return tuple(self.ask(messages))
        return self.encode(self.template(messages, True))

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def conversation(self, row: Row) -> list[dict] | None:
        """The turns before the row's answer; from its text where the file does not tell them. None: not to be read."""
        if row.messages:
            last = max((i for i, m in enumerate(row.messages) if m["role"] == "assistant"), default=len(row.messages))
            return list(row.messages[:last])
        text = self.decode(row.ids[: self.end(row)])
        before, _, rest = text.partition(self.opening)
        content, closed, _ = rest.partition(self.closing.rstrip() or self.closing)
        if not self.opening.strip() or before == text or not closed or self.opening in rest:
            return None
        return [{"role": "user", "content": content}]

    def end(self, row: Row) -> int:
        """Tokens of the row's prompt; from the template's own marks where the mask says nothing."""
        if 0 < row.prompt < len(row.ids) or not self.generation:
            return row.prompt
        mark = self.encode(self.generation)
        places = [i for i in range(len(row.ids)) if row.ids[i : i + len(mark)] == mark]
        return places[-1] + len(mark) if places else len(row.ids)

    def difference(self, row: Row, number: int = 0) -> Difference | None:
        """The first place where the row's prompt is not what is served; None where they are equal.

        Rows of several turns without `messages` are compared up to the first user turn.
        """
        turns, end = self.conversation(row), self.end(row)
        served = self.ids(turns) if turns is not None else self.encode(self.head)
        trained = row.ids[:end] if turns is not None else row.ids[: len(served)]
        if row.ids[: len(served)] == served and (end <= len(served) or turns is None):
            return None
        at = _common(trained, served)
        around = (self.decode(ids[max(0, at - AROUND) : at + AROUND]) for ids in (row.ids, served))
        return Difference(number, at, self._kind(trained, served, at, turns), *around)

    def _kind(self, trained: tuple[int, ...], served: tuple[int, ...], at: int, turns: list[dict] | None) -> str:
        """The likely kind of a difference, from what lies between the common start and the common end."""
        tail = min(_common(trained[::-1], served[::-1]), min(len(trained), len(served)) - at)
        mine, theirs = trained[at : len(trained) - tail], served[at : len(served) - tail]
        bos = (getattr(self.tokenizer, "bos_token_id", None),)
        if at <= 1 and bos in (mine, theirs) and () in (mine, theirs):
            longer, other, short = ("the training rows", "serving", served) if mine else ("serving", "", trained)
            return f"BOS doubled in {longer}" if short[:1] == bos else f"BOS missing in {other or 'the training rows'}"
        if any(THINK.search(self.decode(ids)) for ids in (mine, theirs)):
            return "think tags"
        if self.decode(trained) == self.decode(served):
            return "same text, other tokens"
        text, content = self.decode(served), turns[-1]["content"] if turns else ""
        begin = len(self.encode(text[: text.rfind(content)])) if content in text else 0
        opened = self.decode(trained).rpartition(content)[0].endswith(self.opening) if content else False
        if opened and at < begin and len(served) - tail <= begin:
            return "system prompt " + ("differs" if mine and theirs else "only in training" if mine else "only served")
        if turns and at >= len(served) - len(self.encode(self.generation)):
            return "generation prompt"
        return "template differs"

    def swap(self, rows: Sequence[Row]) -> Callable[[Sequence[int]], tuple[int, ...]] | None:
        """Served prompt ids -> the same prompt as the rows have it; None where start and end do not differ."""
        pairs = [(r.ids[: self.end(r)], self.ids(t)) for r in rows if (t := self.conversation(r)) is not None]
        if len(pairs) < FEW:
            return None
        sides = [*zip(*pairs, strict=True)]
        mine, theirs = _apart(*map(_shared, sides))
        last, served = _apart(*(_shared([ids[::-1] for ids in side]) for side in sides))

        def put(prompt: Sequence[int]) -> tuple[int, ...]:
            ids = tuple(prompt)
            if ids[: len(theirs)] != theirs or ids[::-1][: len(served)] != served:
                raise KitError(
                    "A prompt does not begin and end as the served template does; render it as it is served."
                )
            return (*mine, *ids[len(theirs) : len(ids) - len(served)], *last[::-1])

        return put if (mine, last) != (theirs, served) else None


def _shared(many: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """What all begin with."""
    return tuple(many[0][: min(_common(many[0], other) for other in many)])


def _apart(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Both without the end they share."""
    same = _common(a[::-1], b[::-1])
    return a[: len(a) - same], b[: len(b) - same]


def _common(a: Sequence, b: Sequence) -> int:
    """How many items both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
