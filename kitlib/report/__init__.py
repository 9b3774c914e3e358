"""All notebooks, run strictly, as one folder of HTML that can be sent to somebody.

papermill forgives what a debugging report must not: unknown parameters, `sys.exit(0)`, a parameters cell it
cannot read, another interpreter's kernel. Here each is a refusal in one sentence or a crashed notebook.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..findings import Evidence, Finding, KitError, Report, write_atomic
from .pages import index_page, notebook_page, provenance, redact, summary
from .params import assign, parameters, parse_params

__all__ = ["parameters", "parse_params", "run"]

ROOT = Path(__file__).resolve().parents[2]
MARKER = ".kitlib-report"  # in every folder we made: the list of files that are ours to replace


def run(
    params: Mapping[str, Any],
    out: str | Path,
    notebooks: list[Path] | None = None,
    *,
    echo: Callable[[str], Any] = print,
) -> Report:
    """Run the notebooks one after another and leave a report in `out`; returns the merged findings.

    A notebook that fails is kept with its traceback and becomes a crashed finding; the others still run.
    Raises KitError, before anything runs, for bad parameters and for a folder that is not ours to write.
    """
    books = [Path(n).absolute() for n in notebooks or sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))]
    stems = [book.stem for book in books]
    if not books or len(set(stems)) < len(books):
        raise KitError(f"A report needs notebooks, each with a name of its own, not {stems}.")
    taken = assign(params, books)
    out, ours = _claim(Path(out))
    build = Path(tempfile.mkdtemp(prefix=".build-", dir=out))
    try:
        runs = []
        with _this_python():
            for book in books:
                runs.append(_execute(book, taken[book], build))
                echo(f"{book.stem:<28} {runs[-1]['seconds']:6.1f} s  {runs[-1]['verdict']}")
        for path in [*(build / "executed").iterdir(), *(build / f"{stem}.json" for stem in stems)]:
            if path.exists():
                text = path.read_text(encoding="utf-8").replace(f"/{build.name}", "")
                path.write_text(redact(text), encoding="utf-8")
        report = _merge(runs, params)
        for stem in stems:
            page = notebook_page(build / "executed" / f"{stem}.ipynb", stems)
            write_atomic(build / f"{stem}.html", page)
        report.save(build / "findings.json")
        write_atomic(build / "summary.md", redact(summary(report)))
        write_atomic(build / "index.html", redact(index_page(report, out.name)))
        _publish(build, out, ours)
    finally:
        shutil.rmtree(build, ignore_errors=True)
    echo(report.verdict())
    echo(f"Report: {out / 'index.html'} (notebooks took {report.extra['notebook_seconds']} s)")
    return report


def _claim(out: Path) -> tuple[Path, set[str]]:
    """The folder, existing, writable and ours, with the files in it that we may replace."""
    try:
        out = out.expanduser().resolve()
        marker = out / MARKER
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()) and not marker.is_file():
            raise KitError(f"{out} holds files that no report made; choose another folder with --out.")
        ours = json.loads(marker.read_text(encoding="utf-8")) if marker.exists() else []
        if not (isinstance(ours, list) and all(isinstance(n, str) and _inside(n) for n in ours)):
            raise ValueError(f"{MARKER} is not this kit's")
        write_atomic(marker, json.dumps(ours))
        return out, set(ours)
    except (OSError, ValueError, RuntimeError) as error:
        raise KitError(f"Cannot write a report in {out} ({error}); choose another folder with --out.") from None


def _inside(name: str) -> bool:
    """A relative path that stays in its folder."""
    return not Path(name).is_absolute() and ".." not in Path(name).parts


@contextmanager
def _this_python() -> Iterator[None]:
    """Kernel `python3` is this interpreter, can import kitlib, and reads nothing of the user's Jupyter."""
    from ipykernel.kernelspec import get_kernel_dict

    before, log = dict(os.environ), logging.getLogger("papermill")
    paths = [str(ROOT), *filter(None, [before.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as home:
        env = {"KITLIB_HEADLESS": "1", "IPYTHONDIR": home, "PYTHONPATH": os.pathsep.join(paths)}
        spec = {**get_kernel_dict(["--log-level=ERROR"]), "env": env}
        write_atomic(Path(home, "kernels/python3/kernel.json"), json.dumps(spec))
        os.environ.update(JUPYTER_PATH=home, JUPYTER_RUNTIME_DIR=home)
        log.setLevel(logging.ERROR)  # it warns of parameters that `parameters` reads and it cannot
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def _execute(book: Path, params: dict[str, Any], build: Path) -> dict[str, Any]:
    """Run one notebook into build/executed; a crash is data."""
    import papermill

    executed, saved = build / "executed" / book.name, build / f"{book.stem}.json"
    executed.parent.mkdir(exist_ok=True)
    if "out" in parameters(book):
        params = {**params, "out": str(build)}
    paths = [str(path).replace("{", "{{").replace("}", "}}") for path in (book, executed)]
    problem, report, started = "", None, time.perf_counter()
    try:
        papermill.execute_notebook(
            *paths, params, kernel_name="python3", language="python", cwd=os.getcwd(), progress_bar=False
        )
    except Exception as error:  # whatever it was, the other notebooks still run
        name, text = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", str(error))
        problem = f"{name}: {' '.join(str(text).split())[:300]}"
    if not executed.exists():
        shutil.copy(book, executed)
    where = _stopped(json.loads(executed.read_text(encoding="utf-8"))["cells"])
    if where:
        problem = f"{problem or 'it ended before its last cell'}, {where}"
    try:
        report = Report.load(saved)
    except KitError:
        problem = problem or f"it saved no findings as {saved.name}"
    return {
        "notebook": book.stem,
        "verdict": f"☠ crashed: {problem}" if problem else report.verdict(),
        "seconds": round(time.perf_counter() - started, 1),
        "problem": problem,
        "report": report or Report({}),
    }


def _stopped(cells: list[dict[str, Any]]) -> str:
    """Where a notebook stopped: the code cell that failed, or the last before one that never began."""
    heading, place = "the start", ""
    for cell in cells:
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            titles = [line.lstrip("# ") for line in source.splitlines() if line.startswith("#")]
            heading = titles[-1] if titles else heading
        elif cell["cell_type"] == "code" and source:
            failed = cell["metadata"].get("papermill", {}).get("exception")  # None: the cell never began
            before, place = (
                place,
                f"in the cell under “{heading}” that begins `{source.splitlines()[0][:60]}`",
            )
            if failed is None or failed or any(out["output_type"] == "error" for out in cell["outputs"]):
                return before if failed is None and before else place
    return ""


def _merge(runs: list[dict[str, Any]], params: Mapping[str, Any]) -> Report:
    """One report from those of the notebooks; what one of them did run is not listed as not run."""
    subject, found, left, extra = {}, [], [], {}
    for one in runs:
        report = one["report"]
        subject |= {key: value for key, value in report.subject.items() if value}
        extra |= report.extra
        found += [finding for finding in report.findings if finding not in found]
        left += [item for item in report.not_run if item not in left]
        if one["problem"]:
            title = f"notebook {one['notebook']} crashed, so its checks are incomplete"
            evidence = [Evidence("log", one["problem"])]
            found.append(Finding.of("E901", title, status="crashed", evidence=evidence))
    ran = {finding.slug for finding in found if finding.status in ("pass", "fail")}
    extra["notebooks"] = [{key: one[key] for key in ("notebook", "verdict", "seconds")} for one in runs]
    extra["notebook_seconds"] = round(sum(one["seconds"] for one in runs), 1)
    extra["parameters"] = {name: redact(str(value)) for name, value in params.items()}
    extra["provenance"] = provenance(ROOT)
    return Report(subject, tuple(found), tuple(item for item in left if item["slug"] not in ran), extra)


def _publish(build: Path, out: Path, ours: set[str]) -> None:
    """Move every file into place, each whole and the index last; then remove what an older report left."""
    files = [str(path.relative_to(build)) for path in build.rglob("*") if path.is_file()]
    for name in files:
        if name not in ours and (out / name).exists():
            raise KitError(f"{out / name} was made by no report; move it or choose another folder with --out.")
    write_atomic(out / MARKER, json.dumps(sorted(ours.union(files))))
    for name in sorted(files, key="index.html".__eq__):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(build / name, out / name)
    for name in ours.difference(files):
        (out / name).unlink(missing_ok=True)
    write_atomic(out / MARKER, json.dumps(sorted(files)))
