"""A model repository on a hub, read by HTTP range requests: headers, configs and vocabulary maps, never a whole file.

Nothing is written and no telemetry is sent. huggingface_hub (address, token, offline switch, HTTP session) is imported
only when a repository is asked for, as it takes longer than a whole check of local files.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn
from urllib.parse import quote, urlsplit

from .. import __version__
from ..findings import KitError
from .headers import PICKLES, Remote

ID = re.compile(r"([A-Za-z0-9](?:[\w.-]*\w)?/\w(?:[\w.-]{0,94}\w)?)(?:@([\w./+-]+))?", re.ASCII)
FILES = (".safetensors", ".json", ".gguf", *PICKLES)  # a path that ends so is a file's
HEAD = 4096  # bytes of a file that are asked for first: most headers and configs end within them
LISTING = 4 << 20  # bytes of the answer that lists a repository's files
MOST = 32 << 20  # bytes fetched of one repository


class HubError(KitError):
    """The hub does not give what was asked: missing, gated, offline, or no hub at all."""


def named(path: str | os.PathLike[str]) -> Repository | None:
    """The repository that `org/name` or `org/name@revision` means; None for other spellings and for what lies here."""
    text = os.fspath(path)
    found = ID.fullmatch(text)
    if not found or text.endswith((*FILES, ".git")) or "--" in found[1] or ".." in text or os.path.lexists(text):
        return None
    return Repository(found[1], found[2] or "")


@dataclass(frozen=True)
class HubFile(Remote):
    """One file of a repository; its parts are fetched as they are asked for and kept."""

    repository: Repository
    name: str

    def __fspath__(self) -> str:
        return f"{self.repository}/{self.name}"

    __str__ = __fspath__

    def size(self) -> int:
        return self.repository.part(self.name, 0, HEAD)[1]

    def read(self, start: int, count: int) -> bytes:
        head = self.repository.part(self.name, 0, HEAD)[0]
        if start + count <= len(head):
            return head[start : start + count]
        data = self.repository.part(self.name, start, count)[0]
        if len(data) < count:
            raise HubError(f"{self} ends before byte {start + count}; try again.")
        return data


class Repository:
    """One revision of a model repository; `requests` and `fetched` (bytes) count what the hub has answered."""

    def __init__(self, name: str, revision: str = "") -> None:
        self.name, self.revision = name, revision
        self.commit = ""  # known once the files have been listed; they are then read at this commit
        self.requests = self.fetched = 0
        self._parts: dict[tuple[str, int, int], tuple[bytes, int]] = {}

    def __fspath__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name

    __str__ = __fspath__

    def __truediv__(self, name: str) -> HubFile:
        return HubFile(self, name)

    def download(self, folder: str = "") -> str:
        """The command that downloads it; `folder` defaults to the repository's own name."""
        revision = ["--revision", self.revision] if self.revision else []
        folder = folder or f"./{self.name.partition('/')[2]}"
        return shlex.join(["hf", "download", self.name, *revision, "--local-dir", folder])

    @cached_property
    def names(self) -> frozenset[str]:
        """The files at the repository's root."""
        url = f"{_hub().constants.ENDPOINT}/api/models/{self.name}"
        url += f"/revision/{quote(self.revision, safe='')}" if self.revision else ""
        raw, size = self._get(url, LISTING)
        try:
            if size > LISTING:
                raise ValueError
            told = json.loads(raw)
            names = frozenset(s["rfilename"] for s in told["siblings"] if "/" not in s["rfilename"])
            if re.fullmatch(r"[0-9a-f]{40,64}", str(told.get("sha"))):
                self.commit = told["sha"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise HubError(f"{_host()} does not list the files of {self} as a hub does; check HF_ENDPOINT.") from None
        return names

    def part(self, name: str, start: int, count: int) -> tuple[bytes, int]:
        """At most `count` bytes of a file from byte `start`, and the size of the whole file."""
        key = (name, start, count)
        if key not in self._parts:
            url = _hub().hf_hub_url(self.name, name, revision=self.commit or self.revision or None)
            self._parts[key] = self._get(url, count, start, name)
        return self._parts[key]

    def _get(self, url: str, count: int, start: int | None = None, name: str = "") -> tuple[bytes, int]:
        """At most `count` bytes of an answer, and its full size; with `start`, of the file `name` from there."""
        if self.fetched + count > MOST:
            what = f"{self} would need more than the {MOST >> 20} MB that are fetched of a hub repository"
            raise HubError(f"{what}; download it first: {self.download()}")
        hub = _hub()
        import httpx

        headers = {"user-agent": f"kitlib/{__version__}", "accept-encoding": "identity", **_authorization()}
        if start is not None:
            headers["range"] = f"bytes={start}-{start + count - 1}"
        try:
            timeout = hub.constants.HF_HUB_DOWNLOAD_TIMEOUT
            with hub.get_session().stream("GET", url, headers=headers, timeout=timeout) as answer:
                try:
                    if answer.status_code not in (200, 206, 416):
                        self._refused(answer, name)
                    return self._body(answer, count, start)
                finally:
                    self.requests += 1 + len(answer.history)
                    self.fetched += sum(a.num_bytes_downloaded for a in (*answer.history, answer))
        except hub.errors.OfflineModeIsEnabled:
            why = f"There is no folder {self} here, and as HF_HUB_OFFLINE is set, no hub is asked for it"
            raise HubError(f"{why}; unset it, or pass a folder that holds it.") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, ImportError) as error:  # texts may hold a token
            why = f"There is no folder {self} here, and the hub at {_host()} cannot be asked ({type(error).__name__})"
            raise HubError(f"{why}; check the spelling, the network and HF_ENDPOINT.") from None

    def _body(self, answer: Any, count: int, start: int | None) -> tuple[bytes, int]:
        """The first `count` bytes of the body, and the size that the answer tells of the whole."""
        partial, told = answer.status_code == 206, answer.headers.get("content-length", "")
        if answer.status_code == 416:  # an empty file has no first byte
            return b"", 0
        if partial:
            span, _, told = answer.headers.get("content-range", "").partition("/")
        if start and not (partial and span.startswith(f"bytes {start}-")):
            raise HubError(f"{_host()} does not answer range requests; download it first: {self.download()}")
        body = bytearray()
        for piece in answer.iter_raw():
            body += piece
            if len(body) >= count:
                break
        if not partial and len(body) < count:
            told = str(len(body))
        if not re.fullmatch("[0-9]{1,18}", told):
            raise HubError(f"{_host()} does not say how long a file is; download it first: {self.download()}")
        return bytes(body[:count]), int(told)

    def _refused(self, answer: Any, name: str) -> NoReturn:
        """One sentence for an answer without content; what the server wrote is not repeated."""
        status, code = answer.status_code, answer.headers.get("x-error-code", "")
        if status in (401, 403) and code == "GatedRepo":
            do = f"ask for access on its page at {_host()}, and set HF_TOKEN"
            raise HubError(f"{self.name} is gated, and its files are not given to you (answer {status}); {do}.")
        if code == "RevisionNotFound":
            raise HubError(f"{self.name} has no revision {self.revision or 'main'} at {_host()}; check its spelling.")
        if code == "EntryNotFound":
            raise HubError(f"{self} at {_host()} holds no {name}; name a repository that does.")
        if status in (401, 403, 404) and not (answer.history or self.commit):
            what = f"There is no folder {self} here, and no such repository at {_host()} (answer {status})"
            raise HubError(f"{what}; check the spelling, and for a private one that HF_TOKEN may read it.")
        raise HubError(f"The hub at {_host()} answers {status} for {self}; try again later.")


def _hub() -> Any:
    """huggingface_hub, imported now; it reads HF_ENDPOINT, HF_HUB_OFFLINE and the like when it is imported."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except (ImportError, ValueError) as error:
        why = f"huggingface_hub cannot be imported ({type(error).__name__})"
        raise HubError(f"{why}; check its installation and HF_ENDPOINT, or pass a folder.") from None
    return huggingface_hub


def _host() -> str:
    """Where the hub is, without a user or password that HF_ENDPOINT may hold."""
    try:
        return urlsplit(_hub().constants.ENDPOINT).netloc.rpartition("@")[2] or "no address"
    except ValueError:
        return "no address"


def _authorization() -> dict[str, str]:
    hub = _hub()
    try:
        token = None if hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else hub.get_token()
    except Exception:  # files, colab secrets, token exchange: whatever it says might hold a secret
        raise HubError("The hub's token cannot be read; set HF_TOKEN, or log in again with hf auth login.") from None
    return {"authorization": f"Bearer {token}"} if token else {}
