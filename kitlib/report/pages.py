"""The files of a report that people open: one page a notebook, the index, the summary for an issue."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import subprocess
from html import escape
from pathlib import Path

from .. import __version__, show
from ..findings import Report

STYLE = """:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:70em;margin:auto}
img{background:#fff;max-width:100%;height:auto}pre{overflow-x:auto;font-size:.85em}code{background:#8882}
main{padding:1em}.text_cell table{border-collapse:collapse}.ansi-red-fg,.ansi-red-intense-fg{color:#d55e00}
.text_cell td,.text_cell th{border-bottom:1px solid #8886;padding:.25em .8em;text-align:left}"""
SECRET = (
    re.compile(  # a flag or variable that names a secret, then its value, perhaps quoted, perhaps inside JSON or HTML
        r"""(--[\w-]*(?:key|token|passw(?:or)?d|secret)(?:\s*=\s*|\s+)"""
        r"""|\b\w*(?:TOKEN|SECRET|PASSWORD|API_KEY|ACCESS_KEY)=)"""
        r"""((?:\\?["']|&quot;|&\#x?27;)*)[^\s"'\\&<-][^\s"'\\&<]*"""
    )
)
BARE = re.compile(  # what is a secret by itself
    r"\b(?:hf_|sk-|ghp_|nvapi-)[\w-]{8,}|(?<=Bearer )[^\s\"'\\&<]+|(?<=://)[^\s/@:]+:[^\s/@]+(?=@)"
)


def notebook_page(executed: Path, stems: list[str]) -> str:
    """An executed notebook as HTML without code, scripts, widgets or anything loaded from elsewhere."""
    import nbformat
    from nbconvert import HTMLExporter
    from nbconvert.preprocessors import CoalesceStreamsPreprocessor

    book = nbformat.read(executed, as_version=4)
    book, _ = CoalesceStreamsPreprocessor().preprocess(book, {})  # of a progress bar, the last state
    for cell in book.cells:
        if cell.cell_type == "code":
            widget = "application/vnd.jupyter.widget-view+json"
            cell.outputs = [output for output in cell.outputs if widget not in output.get("data", {})]
    exporter = HTMLExporter(template_name="basic", exclude_input=True, exclude_output_prompt=True)
    exporter.exclude_anchor_links = True
    body, _ = exporter.from_notebook_node(book)
    body = re.sub(r"<script\b.*?</script>", "", body, flags=re.DOTALL | re.IGNORECASE)
    names = "|".join(map(re.escape, stems))
    body = re.sub(rf'href="(?:\./)?({names})\.ipynb', r'href="\1.html', body)
    return _document(executed.stem, f'<nav><a href="index.html">All findings</a></nav>{body}')


def index_page(report: Report, name: str) -> str:
    """The page to open first: verdict, notebooks, findings, what did not run, provenance."""
    seconds = report.extra["notebook_seconds"]
    rows = [{**book, "seconds": f"{book['seconds']:.1f}"} for book in report.extra["notebooks"]]
    books = show.table(rows, caption=f"Notebooks ({seconds} s)").body
    for row in rows:
        stem = escape(row["notebook"])
        books = books.replace(f">{stem}<", f'><a href="{stem}.html">{stem}</a><', 1)
    facts = {**report.subject, **report.extra["parameters"], **report.extra["provenance"]}
    blocks = [show.verdict(report).body, books, show.findings(report).body, show.provenance(facts).body]
    files = " · ".join(f'<a href="{file}">{file}</a>' for file in ("findings.json", "summary.md", "executed/"))
    body = show.Block("", "".join(blocks))._repr_html_()
    return _document(f"Drafter report {name}", f"<h1>Drafter report {escape(name)}</h1>{body}<p>{files}</p>")


def summary(report: Report) -> str:
    """What to paste into an issue: the verdict, what failed, what did not run, versions."""
    bad = Report(report.subject, report.errors + report.warnings, report.not_run)
    lines = [f"{book['notebook']}: {book['verdict']}" for book in report.extra["notebooks"]]
    lines += ["", str(show.findings(bad)).replace("~~~~", "~~~"), ""]
    lines += [f"{key}: {value}" for key, value in {**report.subject, **report.extra["provenance"]}.items()]
    return "\n".join([f"**{report.verdict()}**", "", "~~~~text", *lines, "~~~~", ""])


def provenance(root: Path) -> dict[str, str]:
    """Versions that a bug report needs, and the commit where the kit lies in a git checkout."""
    facts = {"kitlib": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in ("torch", "transformers", "sglang"):
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "not installed"
    if (root / ".git").exists() and shutil.which("git"):
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
        facts["commit"] = subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    return facts


def redact(text: str) -> str:
    """The text without tokens and keys."""
    return BARE.sub("[redacted]", SECRET.sub(r"\1\2[redacted]", text))


def _document(title: str, body: str) -> str:
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><main>{body}</main></body></html>\n"
    )
