"""Drafter checkpoints from dialect to dialect: new names, new config, the same tensor bytes, verified.

What would be written is planned first (`plan.py`). The bytes are then copied undecoded into a hidden sibling folder,
hashed on both sides and checked before the folder gets its name, so nothing half-done is ever seen.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from ..checkpoint import INDEX, Checkpoint, TensorInfo
from ..checks import check
from ..contract import TargetInfo
from ..engines import Engine, rules
from ..findings import Evidence, Finding, KitError, Report
from ..launch import Launch
from .plan import Form, Plan, same_meaning

__all__ = ["Form", "Plan", "convert", "same_meaning"]
Progress = Callable[[str, int, int], None]  # phase ("write" or "verify"), bytes of it done, bytes in all
CHUNK, PAGE = 16 << 20, 4096  # bytes
INHERENT = ("K106", "K110", "K112")  # errors no conversion cures; values are copied as they are (K105)
NO_KERNEL_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)


def convert(
    source: str | Path,
    out: str | Path,
    to: str = "sglang==0.5.9",
    *,
    force: bool = False,
    target: str | Path | None = None,
    progress: Progress = lambda phase, done, total: None,
) -> Report:
    """Write a new folder that means to `to` what `source` means to its trainer; the source is only read.

    The report is the check of the result, with a `conversion` entry (names, bytes, seconds of each phase, SHA-256 of
    each tensor). KitError, and nothing left behind, if `out` exists or lies inside the source, if `to` cannot express
    the drafter or the result fails its check (both unless `force`), or if the disk refuses.
    """
    checkpoint, out, form = Checkpoint.open(source), Path(out), Form.of(to)
    if os.path.lexists(out):
        raise KitError(f"{out} exists and is never overwritten; name a new folder.")
    if not out.parent.is_dir():
        raise KitError(f"{out.parent} is no folder; make it first, or name another place.")
    home = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    if out.resolve().is_relative_to(home.resolve()) and (checkpoint.path.is_dir() or (home / "config.json").exists()):
        raise KitError(f"{out} lies inside the checkpoint, which is never touched; name a folder outside {source}.")
    info = TargetInfo.of(target) if target else None
    plan = Plan.of(checkpoint, form, info)
    if not plan.errors or force:  # what the rules have nothing against may still be sick in itself
        sick = check(source, target=target, engines=(form.to if form.release else "",)).errors
        goes_along = [f for f in sick if f.code in INHERENT and not (f.code == "K110" and plan.rewritten)]
        plan = replace(plan, findings=(*plan.findings, *goes_along))
    if plan.errors and not force:
        raise KitError(_refusal(checkpoint, plan, info))
    total = sum(t.nbytes for t in checkpoint.tensors.values())
    stop, work = threading.Event(), None
    with ThreadPoolExecutor(1) as hasher:
        try:
            times = [time.perf_counter()]
            work = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
            jobs, tick = [], _meter("write", total, progress)
            for file in checkpoint.files:
                tensors = sorted((t for t in checkpoint.tensors.values() if t.file == file), key=_place)
                name = file.name if len(checkpoint.files) > 1 else "model.safetensors"
                handle = _write(work / name, tensors, plan, checkpoint.metadata[file], tick)
                jobs.append(hasher.submit(_hashes, tensors, stop))  # from memory, while the disk is busy writing
                _close(handle)
            if len(checkpoint.files) > 1:
                shards = {plan.names[t.name]: t.file.name for t in checkpoint.tensors.values()}
                _save(work / INDEX, {"metadata": {"total_size": total}, "weight_map": shards})
            _save(work / "config.json", plan.config)
            _close(os.open(work, os.O_RDONLY))
            times.append(time.perf_counter())
            wanted = {name: digest for job in jobs for name, digest in job.result().items()}
            wanted |= {name: hashlib.sha256(data).hexdigest() for name, data in plan.rewritten.items()}
            found = _hashes(Checkpoint.open(work).tensors.values(), stop, _meter("verify", total, progress))
            if broken := [name for name, digest in wanted.items() if found.get(plan.names[name]) != digest]:
                raise KitError(
                    f"{broken[0]} is not as in {source}: that changed meanwhile or the disk failed; run it again."
                )
            times.append(time.perf_counter())
            if (failed := _checked(work, plan, target).errors) and not force:
                raise KitError(f"The result would fail its check for {form.to} ({failed[0].title}); nothing was kept.")
            work.chmod(0o755)
            os.rename(work, out)
            _close(os.open(out.parent, os.O_RDONLY))
        except OSError as error:
            why = error.strerror or error
            raise KitError(f"Cannot write {out} ({why}); nothing was kept, so choose another place.") from None
        finally:
            stop.set()
            if work:
                shutil.rmtree(work, ignore_errors=True)
    seconds = {"write": times[1] - times[0], "verify": times[2] - times[1]}
    renamed = {a: b for a, b in plan.names.items() if a != b}
    did = {"out": str(out), "to": form.to, "renamed": renamed, "rewritten": list(plan.rewritten), "sha256": found}
    report = _checked(out, plan, target)
    return replace(report, extra={**report.extra, "conversion": {**did, "bytes": total, "seconds": seconds}})


def _write(path: Path, tensors: list[TensorInfo], plan: Plan, metadata: Mapping[str, str], tick: Callable) -> int:
    """One file of the result, from one of the source: its handle, whose bytes the disk may not have yet."""
    header, at = {"__metadata__": {"format": "pt", **metadata}}, 0
    for t in tensors:
        header[plan.names[t.name]] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": (at, at + t.nbytes)}
        at += t.nbytes
    raw, start = json.dumps(header, separators=(",", ":")).encode(), tensors[0].start
    # Trailing spaces belong to the format. At the same place of a page, a file system can share the blocks.
    base = 8 + len(raw) + ((start if start % 8 == 0 else 0) - 8 - len(raw)) % PAGE
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    origin = os.open(tensors[0].file, os.O_RDONLY)
    try:
        _put(target, (base - 8).to_bytes(8, "little") + raw.ljust(base - 8), 0)
        done = 0
        while done < at:  # the source has no holes: `Checkpoint.open` saw to that
            step = min(CHUNK - (start + done) % PAGE, at - done)
            done += (step := _copy(origin, start + done, target, base + done, step))
            tick(step)
        for t in tensors:
            _put(target, plan.rewritten.get(t.name, b""), base + t.start - start)
    except BaseException:
        os.close(target)
        raise
    finally:
        os.close(origin)
    return target


def _copy(source: int, start: int, target: int, at: int, count: int) -> int:
    """Some of the next `count` bytes: inside the kernel where it can (XFS and btrfs share blocks), else through us."""
    try:
        if done := os.copy_file_range(source, target, count, start, at):
            return done
    except AttributeError:  # not Linux
        pass
    except OSError as error:
        if error.errno not in NO_KERNEL_COPY:
            raise
    if not (data := os.pread(source, count, start)):
        raise OSError(errno.EIO, "the source became shorter while it was copied")
    return os.pwrite(target, data, at)


def _put(target: int, data: bytes, at: int) -> None:
    while data:
        done = os.pwrite(target, data, at)
        data, at = data[done:], at + done


def _close(handle: int) -> None:
    """Close a file or folder once the disk has it."""
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _save(path: Path, value: object) -> None:
    with open(path, "x", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _place(tensor: TensorInfo) -> tuple[str, int, int]:
    return str(tensor.file), tensor.start, tensor.nbytes


def _hashes(tensors: Iterable[TensorInfo], stop: threading.Event, tick: Callable = lambda n: None) -> dict[str, str]:
    """SHA-256 of each tensor's bytes; gives up when `stop` is set."""
    found, buffer = {}, memoryview(bytearray(1 << 20))
    for t in sorted(tensors, key=_place):
        digest, left = hashlib.sha256(), t.nbytes
        with open(t.file, "rb", buffering=0) as file:
            file.seek(t.start)
            while left and not stop.is_set() and (got := file.readinto(buffer[: min(left, len(buffer))])):
                digest.update(buffer[:got])
                left -= got
                tick(got)
        found[t.name] = digest.hexdigest() if not left else "cut short"
    return found


def _meter(phase: str, total: int, progress: Progress) -> Callable[[int], None]:
    done = 0

    def tick(count: int) -> None:
        nonlocal done
        done += count
        progress(phase, done, total)

    return tick


def _checked(folder: Path, plan: Plan, target: str | Path | None) -> Report:
    """The pre-flight of the result for its reader, and what the plan had against it."""
    engine, to = plan.form.engine, plan.form.to
    if (engines := Path(rules.__file__).parent / f"{engine}.toml").exists():
        report = check(folder, target=target, engines=(to,), launch=Launch(engine))
    else:
        same = f"{len(plan.names) - len(plan.rewritten)} of {len(plan.names)} tensors equal the source's by SHA-256"
        passed = Finding.of("K101", status="pass", evidence=[Evidence("header", same)])
        why = f"there is no {engines.name} with rules to check the result by"
        subject = {"drafter": str(folder), "target": str(target or ""), "engines": [to]}
        report = Report(subject, (passed,), ({"slug": "key-naming", "reason": why},))
    known = {(f.code, f.status) for f in report.findings}
    more = tuple(f for f in plan.findings if (f.code, f.status) not in known)
    return replace(report, findings=more + report.findings)


def _refusal(source: Checkpoint, plan: Plan, target: TargetInfo | None) -> str:
    """One sentence: what speaks against it, and what would do instead."""
    text, do = "; ".join(f"{f.code} {f.title}" for f in plan.errors[:3]), "repair the source or choose another reader"
    if plan.form.release and all(f.engine for f in plan.errors):  # no fault of the source itself
        name, engine = plan.form.engine, Engine.load(plan.form.engine)
        later = engine.releases[engine.releases.index(engine.known(plan.form.release)[0]) + 1 :]
        good = next((r for r in later if not Plan.of(source, Form.of(f"{name}=={r}"), target).errors), None)
        do = f"use {name} {good} with --to {name}=={good}" if good else "no later release that was read can either"
    return f"{source.path} was not converted ({text}); {do}, or write it all the same with --force."
