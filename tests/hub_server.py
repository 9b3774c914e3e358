"""A model hub on the loopback: the answers that huggingface_hub and the kit ask for, and a record of every request.

Large files are redirected to a second origin, as a hub's storage is one. Files are served by `pread`, so that a sparse
file of any size costs nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
from checkpoint_files import packed

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 1 << 20  # bytes from which a file lies in the storage
H, V, VD, WIDE = 7168, 163840, 32000, 28672  # Kimi-K2.5's widths; WIDE: the MLP's


@dataclass
class Asked:
    """One request and what was sent for it."""

    role: str  # "hub" or "storage"
    method: str
    path: str
    span: str  # the Range header
    authorization: str
    status: int = 0
    sent: int = 0  # bytes of the body


@dataclass
class Hub:
    """`repositories`: name -> folder. `refused`: a substring of paths -> (status, X-Error-Code)."""

    repositories: dict[str, Path]
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    revisions: tuple[str, ...] = ("main", COMMIT)
    ranges: bool = True  # False: every range request is answered with the whole file
    listing: bytes | None = None  # in place of every listing
    asked: list[Asked] = field(default_factory=list)
    url: str = ""
    storage: str = ""

    @property
    def sent(self) -> int:
        return sum(a.sent for a in self.asked)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub and its storage, each on a port of its own."""
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub, role)) for role in ("hub", "storage")]
    threads = [threading.Thread(target=s.serve_forever, kwargs={"poll_interval": 0.05}) for s in servers]
    hub.url, hub.storage = (f"http://127.0.0.1:{s.server_address[1]}" for s in servers)
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()


def _handler(hub: Hub, role: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            self.form = self.rfile.read(length) if length else b""
            told = (self.headers.get(name) or "" for name in ("Range", "Authorization"))
            self.asked = Asked(role, self.command, self.path, *told)
            hub.asked.append(self.asked)
            path = unquote(urlsplit(self.path).path)
            for part, (status, code) in hub.refused.items():
                if part in path:
                    return self.error(status, code)
            return self.stored(path) if role == "storage" else self.routed(path)

        do_HEAD = do_POST = do_GET

        def routed(self, path: str) -> None:
            name, folder = next(
                ((n, f) for n, f in hub.repositories.items() if f"/{n}/" in f"{path}/"), ("", Path("/nowhere"))
            )
            if not name:
                return self.error(401, "RepoNotFound")
            if path.startswith("/api/models/"):
                return self.api(name, folder, path.removeprefix(f"/api/models/{name}").strip("/"))
            kind, _, rest = path.removeprefix(f"/{name}/").partition("/")
            revision = next((r for r in hub.revisions if rest.startswith(f"{r}/")), "")
            if kind != "resolve" or not revision:
                return self.error(404, "RevisionNotFound")
            file = folder / rest.removeprefix(f"{revision}/")
            if not file.is_file():
                return self.error(404, "EntryNotFound")
            size = file.stat().st_size
            etag = hashlib.sha256(f"{file} {size}".encode()).hexdigest()
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
            if size < LARGE:
                return self.content(file, headers)
            headers |= {"X-Linked-Size": str(size), "X-Linked-Etag": f'"{etag}"'}
            return self.answer(302, b"moved", headers | {"Location": f"{hub.storage}{file}?signature=S3CR3T"})

        def api(self, name: str, folder: Path, what: str) -> None:
            kind, _, revision = what.partition("/")
            if revision and revision not in hub.revisions:
                return self.error(404, "RevisionNotFound")
            files = sorted(f for f in folder.rglob("*") if f.is_file())
            entries = [
                {"type": "file", "path": str(f.relative_to(folder)), "size": f.stat().st_size, "oid": COMMIT}
                for f in files
            ]
            if hub.listing is not None:
                return self.answer(200, hub.listing)
            if kind == "tree":
                return self.json(entries)
            if kind == "paths-info":
                wanted = json.loads(self.form)["paths"]
                return self.json([e for e in entries if e["path"] in wanted])
            siblings = [{"rfilename": e["path"]} for e in entries]
            return self.json({"_id": "0", "id": name, "modelId": name, "sha": COMMIT, "siblings": siblings})

        def stored(self, path: str) -> None:
            self.content(Path(path), {"Accept-Ranges": "bytes"})

        def content(self, file: Path, headers: dict[str, str]) -> None:
            size = file.stat().st_size
            span = re.fullmatch(r"bytes=([0-9]+)-([0-9]*)", self.asked.span) if hub.ranges else None
            if not span:
                return self.answer(200, None, headers | {"Content-Length": str(size)}, file)
            first, last = int(span[1]), min(int(span[2] or size), size - 1)
            if first >= size:
                return self.answer(416, b"", {"Content-Range": f"bytes */{size}"})
            headers |= {"Content-Range": f"bytes {first}-{last}/{size}"}
            with open(file, "rb") as handle:
                self.answer(206, os.pread(handle.fileno(), last - first + 1, first), headers)

        def error(self, status: int, code: str) -> None:
            text = {"RepoNotFound": "Repository not found", "GatedRepo": "Access is restricted"}.get(code, code)
            headers = {"X-Error-Code": code, "X-Error-Message": text} if code else {}
            self.answer(status, json.dumps({"error": text}).encode(), headers)

        def json(self, value: object) -> None:
            self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def answer(self, status: int, body: bytes | None, headers: dict[str, str] = {}, file: Path | None = None):  # noqa: B006
            self.asked.status = status
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body or b""))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            try:
                if file:
                    with open(file, "rb") as handle:
                        while piece := handle.read(1 << 16):
                            self.wfile.write(piece)
                            self.asked.sent += len(piece)
                elif body:
                    self.wfile.write(body)
                    self.asked.sent += len(body)
            except OSError:  # the client has enough
                self.close_connection = True

    return Handler


def sparse_drafter(folder: Path) -> Path:
    """A drafter of 2.4 GB on paper: only its header, its config and its maps take room."""
    folder.mkdir()
    shapes = {"fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (VD, H), "d2t": (VD,), "t2d": (V,)}
    p = "midlayer."
    shapes |= {f"{p}{n}.weight": (H,) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    shapes |= {f"{p}self_attn.{n}_proj.weight": (r, 2 * H) for n, r in (("q", 8192), ("k", 1024), ("v", 1024))}
    shapes |= {f"{p}self_attn.o_proj.weight": (H, 8192), f"{p}mlp.down_proj.weight": (H, WIDE)}
    shapes |= {f"{p}mlp.{n}_proj.weight": (WIDE, H) for n in ("gate", "up")}
    header, end, width = {}, 0, {"d2t": ("I64", 8), "t2d": ("BOOL", 1)}
    for name, shape in shapes.items():
        dtype, item = width.get(name, ("BF16", 2))
        first, end = end, end + item * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}
    raw, ids = packed(header), np.arange(VD) * 5
    with open(folder / "model.safetensors", "wb") as file:
        file.write(raw)
        for name, data in (("d2t", ids - np.arange(VD)), ("t2d", np.isin(np.arange(V), ids))):
            file.seek(len(raw) + header[name]["data_offsets"][0])
            file.write(data.tobytes())
        file.truncate(len(raw) + end)
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": H}
    config |= {"intermediate_size": WIDE, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    config |= {"num_hidden_layers": 1, "vocab_size": V, "draft_vocab_size": VD, "max_position_embeddings": 262144}
    config |= {"rms_norm_eps": 1e-5, "rope_theta": 50000.0, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
