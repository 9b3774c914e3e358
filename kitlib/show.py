"""What a notebook shows: tables, findings, verdicts, figures with alt text, progress, one control.

The only module that imports matplotlib, IPython and ipywidgets, each where it is needed. It knows findings
and plain data. Everything has a plain-text form, and nothing is told by colour alone.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

from .findings import STATUSES, Finding, Report, plain

Rows = Sequence[Mapping[str, Any]]
STATUS = {  # what a row or a finding can be: tone and sign
    **dict.fromkeys(("pass", "loaded", "used", "fixed"), ("good", "✓")),
    **dict.fromkeys(("fail", "missing", "dropped", "refused", "random"), ("bad", "✗")),
    **dict.fromkeys(("warning", "unused", "differs", "overwritten"), ("warn", "!")),
    **dict.fromkeys(("not-applicable", "not-needed", "ignored"), ("mute", "–")),
    "crashed": ("bad", "☠"),
    "renamed": ("note", "→"),
    "not-run": ("mute", "?"),
}
ROLES = {"trained": ("o", "C0"), "fault": ("X", "C5"), "control": ("s", "C3"), "fixed": ("D", "C4")}


class Block:
    """One thing to look at: `text` for terminals and diffs, `body` as escaped HTML for browsers."""

    def __init__(self, text: str, body: str) -> None:
        self.text, self.body = text, body

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        css = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
        return f'<style>{css}</style><div class="kit">{self.body}</div>'


def number(value: Any) -> str:
    """A value as a reader wants it: 49,152 · 1.640 · 3.10e-05 · yes · – for None."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if value is None or isinstance(value, bool):
        return {None: "–", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        size = abs(value)
        if not math.isfinite(size) or (size and not 0.001 <= size < 1e7):
            return f"{value:.2e}"
        return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 100 else f"{value:.3f}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(number, value)) + "]"
    return f"{value:,}" if isinstance(value, int) else plain(" ".join(str(value).split()))


def table(
    rows: Iterable[Mapping[str, Any]], *, caption: str = "", mark: Callable[[Any], str | None] | None = None
) -> Block:
    """Rows as an aligned text table and an escaped HTML one.

    A row's status (its `_status`, or what `mark(row)` answers: a key of `STATUS`) colours the row and stands
    in the first column as a sign and a word. Other keys that start with `_` are not shown.
    """
    rows = list(rows) or [{"": "(no rows)"}]
    states = [(mark(row) if mark else None) or row.get("_status") or "" for row in rows]
    heads = list(dict.fromkeys(key for row in rows for key in row if not key.startswith("_")))
    columns = [[h.replace("_", " "), *(number(r[h]) if h in r else "" for r in rows)] for h in heads]
    if any(states):
        columns.insert(0, ["status", *(f"{STATUS[s][1]} {s}" if s else "" for s in states)])
    right = [all(re.fullmatch(r"[-+\d.,e]*|–|nan|inf", cell) for cell in column[1:]) for column in columns]
    widths = [max(map(len, column)) for column in columns]
    text, html = [], [f"<caption>{_rich(caption)}</caption>"] if caption else []
    for n, line in enumerate(zip(*columns, strict=True)):
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True))
        text.append("  ".join(padded).rstrip())
        state = ["", *states][n]
        html.append(f'<tr class="kit-{STATUS[state][0]}">' if state else "<tr>")
        for i, (cell, flush) in enumerate(zip(line, right, strict=True)):
            scope = "col" if n == 0 else "row" if i == any(states) else ""
            tag = f'th scope="{scope}"' if scope else "td"
            html.append(f"<{tag}{' class=kit-right' if flush else ''}>{_rich(cell)}</{tag[:2]}>")
        html.append("</tr>")
    text.insert(1, "  ".join("─" * width for width in widths))
    return Block("\n".join([caption, *text] if caption else text), f"<table>{''.join(html)}</table>")


def findings(found: Report | Iterable[Finding]) -> Block:
    """Every finding, worst first: its text form, and a block that folds in HTML."""
    report = found if isinstance(found, Report) else Report({}, tuple(found))
    order = sorted(report.findings, key=lambda f: (not f.is_error, STATUSES.index(f.status), f.code))
    left = [f"[?] not run: {n['slug']} ({n['reason']})" for n in report.not_run]
    blocks = [_finding(f) for f in order]
    blocks += [f'<div class="kit-line kit-mute">{_rich(line)}</div>' for line in left]
    return Block("\n".join([*map(str, order), *left]) or "no findings", "".join(blocks) or "no findings")


def verdict(report: Report, path: str | Path | None = None) -> Block:
    """The one line a reader acts on, and where the findings were saved."""
    line, saved = report.verdict(), f"findings saved in {path}" if path else ""
    tone = "bad" if report.errors else "warn" if report.warnings or line[0] != "✓" else "good"
    html = f'<div class="kit-verdict kit-{tone}">{_rich(line)}<br><small>{escape(saved)}</small></div>'
    return Block(f"{line}\n{saved}".strip(), html)


def provenance(facts: Mapping[str, Any]) -> Block:
    """Versions and parameters as a folded last section."""
    shown = table({"what": key, "value": str(value)} for key, value in facts.items())
    return Block(f"Provenance\n{shown}", f"<details><summary>Provenance</summary>{shown.body}</details>")


def figure(fig: Any, alt: str) -> None:
    """Display one matplotlib figure with its alt text (also its plain-text form), and close it."""
    if not alt.strip():
        raise ValueError("a figure needs alt text that says what it shows")
    from IPython.display import display

    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", dpi=192, bbox_inches="tight")
    png = buffer.getvalue()
    width = int.from_bytes(png[16:20], "big") // 2  # drawn at twice the size, for sharp screens
    data = {"image/png": base64.b64encode(png).decode(), "text/plain": alt}
    display(data, raw=True, metadata={"image/png": {"alt": alt, "width": width}})
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close(fig)


def accept_lengths(rows: Rows, expected: float | None = None) -> None:
    """Accept length per wiring as a dot with its interval, and the same numbers as a table.

    Rows: {"name", "accept_length" (None: not run), "interval": (low, high), "role": a key of `ROLES`}.
    `expected` is the accept length that training promised.
    """
    rows = [{"_status": "not-run" if r["accept_length"] is None else "", **r} for r in rows]
    label = "Accept length (tokens per round, includes the target's own)"
    caption = label if expected is None else f"{label}; expected from training: {expected:.2f}"
    with _canvas("Dots with intervals", caption, rows) as axis:
        axis.axvline(1.0, color="0.4", linestyle="--", label="1.0: no draft token accepted")
        if expected is not None:
            axis.axvline(expected, color="C1", linestyle=":", label=f"{expected:.2f}: expected from training")
        for y, row in enumerate(rows):
            value, (marker, colour) = row["accept_length"], ROLES.get(row.get("role", ""), ("v", "C1"))
            if value is None:
                axis.text(1.0, y, "  not run", va="center")
                continue
            low, high = row.get("interval") or (value, value)
            axis.plot([low, high], [y, y], color=colour, linewidth=2.5)
            axis.plot(value, y, marker, color=colour, markersize=8, label=row.get("role", "other"))
            axis.text(max(high, value), y, f"   {value:.2f}", va="center")
        _names(axis, rows, label)


def histogram(rows: Rows) -> None:
    """Share of rounds by number of accepted draft tokens, and the counts as a table.

    Rows: {"name", "histogram": rounds that accepted 0, 1, 2, … draft tokens}.
    """
    _bars(rows, "histogram", 0, "Accepted draft tokens per round (without the target's own)", "Rounds")


def by_position(rows: Rows, what: str = "Share of rounds that accepted it") -> None:
    """Acceptance by draft position, as bars and as a table; `what` says what share is meant.

    Rows: {"name", "by_position": share at draft position 1, 2, …}.
    """
    _bars(rows, "by_position", 1, "Draft position (1 is the first drafted token)", what)


def norms(rows: Rows) -> None:
    """Norm ratio and cosine of feature pairs side by side, 1 being equal, and the numbers as a table.

    Rows: {"name", "norm_ratio", "cosine"}; further keys go to the table only.
    """
    with _canvas("Two dot plots", "Features against those of training; 1 is equal", rows, columns=2) as axes:
        for axis, key, style in zip(axes, ("norm_ratio", "cosine"), ("oC0", "sC5"), strict=True):
            axis.axvline(1.0, color="0.4", linestyle="--", label="1.0: equal")
            axis.plot([r[key] for r in rows], range(len(rows)), style[0], color=style[1:], markersize=8)
            _names(axis, rows, key.replace("_", " ").capitalize())


def timeline(events: Rows) -> None:
    """Two clocks on one picture: what a poll of `/health` saw, each with its error bar, and the log's own stamps.

    Events: {"clock": "health" or "log", "what", "time": datetime, "since": the poll before it, or None}.
    """
    start = min((e["time"] for e in events), default=None)
    spans = [(e["time"] - (e.get("since") or e["time"])).total_seconds() for e in events]
    ends = [(e["time"] - start).total_seconds() for e in events]
    rows = [
        {"clock": e["clock"], "what": e["what"], "time": f"{e['time']:%H:%M:%S}", "seconds": end, "error_bar_s": span}
        for e, end, span in zip(events, ends, spans, strict=True)
    ]
    with _canvas("Marks", "Start-up by two clocks; what a poll saw happened within its error bar", rows, 3.4) as axis:
        for n, (e, end, span) in enumerate(zip(events, ends, spans, strict=True)):
            y, look = {"log": (0, "sC5"), "health": (1, "oC0")}[e["clock"]]
            if span:
                axis.plot([end - span, end], [y, y], color="C0", linewidth=7, alpha=0.35, label="since the poll before")
            axis.plot(end, y, look)
            axis.text(end, y + 0.1 + 0.19 * (n % 4), e["what"], fontsize=8)
        axis.set_yticks([0, 1], ["log", "/health"])
        axis.set_ylim(-0.3, 1.9)
        axis.set_xlabel("Seconds since the first event")


def interactive() -> bool:
    """Whether somebody can move a control here; KITLIB_HEADLESS=1 or =0 decides where it is set."""
    if os.environ.get("KITLIB_HEADLESS"):
        return os.environ["KITLIB_HEADLESS"] == "0"
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    served = {"JPY_SESSION_NAME", "COLAB_RELEASE_TAG"} & set(os.environ)  # set by Jupyter Server, by Colab
    return hasattr(shell, "kernel") and bool(served or "__vsc_ipynb_file__" in shell.user_ns)


def progress(iterable: Iterable[Any], total: int | None = None, desc: str = "") -> Iterable[Any]:
    """The iterable with a progress bar: live where one can live, else text that survives being saved."""
    import tqdm.auto

    if interactive():
        return tqdm.auto.tqdm(iterable, total=total, desc=desc)
    return tqdm.tqdm(iterable, total=total, desc=desc, file=sys.stdout, ncols=80, mininterval=1.0)


def selector(options: Iterable[str], render: Callable[[str], Any], *, default: str, label: str = "Wiring") -> None:
    """Show `render(default)` as ordinary output and, where somebody can use it, a control for the others."""
    _show(render(default))
    if not interactive() or not importlib.util.find_spec("ipywidgets"):
        return
    import ipywidgets

    control = ipywidgets.Dropdown(options=list(options), value=default, description=label)
    output = ipywidgets.Output()

    def changed(change: Mapping[str, Any]) -> None:
        output.clear_output(wait=True)
        with output:
            _show(render(change["new"]))

    control.observe(changed, names="value")
    _show(ipywidgets.VBox([control, output]))


def _show(thing: Any) -> None:
    if thing is not None:
        from IPython.display import display

        display(thing)


@contextmanager
def _canvas(kind: str, caption: str, rows: Rows, height: float = 0, columns: int = 1) -> Iterator[Any]:
    """Axes to draw on, in a style for colour-blind readers; shown at the end, with alt text and table."""
    from matplotlib import style
    from matplotlib.figure import Figure

    plain = {"text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False}
    with style.context(["tableau-colorblind10", plain]):
        fig = Figure(figsize=(8, height or 1.4 + 0.42 * len(rows)), layout="constrained")
        yield fig.subplots(1, columns)
        handles, labels = fig.axes[0].get_legend_handles_labels()
        legend = dict(zip(labels, handles, strict=True))
        fig.legend(legend.values(), legend, loc="outside lower center", ncols=3, frameon=False)
        said = ("; ".join(f"{k} {number(v)}" for k, v in row.items() if k[0] != "_") for row in rows)
        figure(fig, ". ".join([kind, caption, *said]))
    _show(table(rows, caption=caption))


def _bars(rows: Rows, key: str, first: int, label: str, what: str) -> None:
    """Grouped bars of `row[key]`, whose items are numbered from `first`; counts are drawn as shares."""
    lines = [{"name": r["name"], **{str(k): v for k, v in enumerate(r[key], first)}} for r in rows]
    width = 0.8 / max(1, len(rows))
    with _canvas("Grouped bars", f"{what} by: {label}", lines, 3.6) as axis:
        for i, row in enumerate(rows):
            at = [k + (i - (len(rows) - 1) / 2) * width for k in range(first, first + len(row[key]))]
            whole = max(1, sum(row[key])) if what == "Rounds" else 1
            look = {"hatch": ["", "//", "..", "xx", "++"][i % 5], "edgecolor": "w", "color": f"C{i}"}
            axis.bar(at, [v / whole for v in row[key]], width, label=row["name"], **look)
        axis.set_xlabel(label)
        axis.set_ylabel(what.replace("Rounds", "Share of rounds"))
        axis.xaxis.get_major_locator().set_params(integer=True)


def _names(axis: Any, rows: Rows, label: str) -> None:
    """One row name a line, the first on top, and what is measured below."""
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.margins(x=0.15)
    axis.set_xlabel(label)


def _finding(found: Finding) -> str:
    tone, sign = STATUS["warning" if found.status == "fail" and not found.is_error else found.status]
    head = f"<b>{sign} {escape(found.code)} {escape(found.slug)}</b> {escape(found.engine or '')}"
    fix = found.fix
    rows = {
        "evidence": "<br>".join(_rich(f"{e.source}: {e.text}") for e in found.evidence),
        "cause": _rich(found.cause),
        "effect": _rich(found.effect),
        "fix": _rich(fix.text) + f"<br><code>{escape(fix.command)}</code>" * bool(fix.command) if fix else "",
        "learn": _rich(" · ".join(filter(None, [found.learn, f"`python -m kitlib explain {found.code}`"]))),
        "see": "<br>".join(map(_rich, found.references)),
    }
    body = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in rows.items() if text)
    summary = f"<summary>{head} — {_rich(found.title)}</summary>"
    return f'<details class="kit-{tone}"{" open" * found.is_error}>{summary}<dl>{body}</dl></details>'


def _rich(text: str) -> str:
    """Escaped, with `code` and https addresses marked up."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return re.sub(r"https://[^\s<>&;]+", r'<a href="\g<0>">\g<0></a>', text)
