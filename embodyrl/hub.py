"""Checkpoints and data sets on the Hugging Face hub: `hf://owner/name[@revision]`, `hf://datasets/owner/name[@revision]`.

The library huggingface_hub does the work, with its own cache, token and environment variables (HF_HOME, HF_TOKEN,
HF_ENDPOINT, HF_HUB_OFFLINE, HF_HUB_DOWNLOAD_TIMEOUT). It is imported only where a name with hf:// is used.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

from embodyrl.errors import UserError, did_you_mean
from embodyrl.files import NO_FOREIGN_ENTRIES, foreign_entry, is_plain_name
from embodyrl.hub_answers import COMMIT, AnswerError, check_download, expected, is_path, watch

SCHEME = "hf://"
TIMEOUT_S = 10.0
"""Longest wait for an answer about a repository [s]."""
_NAME = re.compile(r"hf://(datasets/)?([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w][\w./-]*))?", re.ASCII)
_SNAPSHOT = re.compile(r"/(model|dataset)s--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})/*$", re.ASCII)


class Kind(StrEnum):
    """Kind of a repository, by the hub's word."""

    model = "model"
    dataset = "dataset"


FILES = {
    Kind.model: (
        *("*.safetensors", "*.json", "training.yaml"),
        *("tokenizer.model", "*/tokenizer.model", "merges.txt", "*/merges.txt"),
        # Heads of OpenVLA-OFT, the only pickles that are read, as tensors alone (weights_only).
        *("action_head--*_checkpoint.pt", "proprio_projector--*_checkpoint.pt"),
        # Signs of a training that is not implemented, by which such a checkpoint is refused.
        *("vision_backbone--*_checkpoint.pt", "noisy_action_projector--*_checkpoint.pt", "params/_METADATA"),
    ),
    Kind.dataset: (
        *("meta/*.json", "meta/*.jsonl", "meta/*.parquet", "data/*.parquet"),
        *("videos/*.mp4", "images/*.png", "images/*.jpg", "images/*.jpeg"),
    ),
}
"""Patterns of the files that are read, by kind (`*` also stands for slashes); no others are downloaded, so no code."""


class HubError(UserError):
    """Raised when something on the hub cannot be had or written."""

    exit_code = 2

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(f"{message}: {remedy}")
        self.message, self.remedy = message, remedy


class UnreachableError(HubError):
    """Raised when the hub gives no answer, or must not be asked."""


@dataclass(frozen=True)
class HubName:
    """Name of a repository on the hub, and its revision."""

    kind: Kind
    repo: str
    """`owner/name`."""
    revision: str = "main"
    """Branch, tag or commit."""

    def __str__(self) -> str:
        folder = "datasets/" if self.kind is Kind.dataset else ""
        return f"{SCHEME}{folder}{self.repo}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return COMMIT.fullmatch(self.revision) is not None

    def at(self, folder: Path) -> HubName:
        """Return the name of exactly that commit which lies in a folder of the cache."""
        return replace(self, revision=folder.name)


@dataclass(frozen=True)
class Listing:
    """Files of a repository that are read."""

    commit: str
    missing: dict[str, int]
    """Sizes by path of those that are not in the cache [bytes]."""
    count: int
    """Number of all."""
    contents: dict[str, tuple[int | None, str | None]]
    """Size [bytes] and SHA-256 of all by path; None: the hub does not say."""


def is_hub_name(text: object) -> bool:
    """Return whether a text begins with hf://."""
    return isinstance(text, str) and text.startswith(SCHEME)


def parse(text: str, kind: Kind) -> HubName:
    """Return the name in a text that begins with hf://.

    Raises:
        HubError: it is malformed, or of the other kind.
    """
    shape = f"{SCHEME}{'datasets/' if kind is Kind.dataset else ''}owner/name"
    found = _NAME.fullmatch(text)
    if found is None or "--" in found[2] or ".." in text:
        raise HubError(f"{text!r} is no name on the hub", f"write {shape} or {shape}@revision")
    if (found[1] is not None) is not (kind is Kind.dataset):
        what = "a data set, not a model" if kind is Kind.model else "a model, not a data set"
        raise HubError(f"{text!r} names {what}", f"write {shape}")
    return HubName(kind, found[2], found[3] or "main")


def parse_repo(repo: str) -> HubName:
    """Return the name of the model in a text `owner/name`, to which something is to be uploaded.

    Raises:
        HubError: it is malformed.
    """
    found = _NAME.fullmatch(f"{SCHEME}{repo}")
    if found is None or found[1] or found[3] or "--" in repo or ".." in repo:
        raise HubError(f"{repo!r} is no name on the hub", "write owner/name")
    return HubName(Kind.model, repo)


def name_of(folder: str) -> HubName | None:
    """Return what a folder of the hub's cache holds, by its commit; None for other folders."""
    found = _SNAPSHOT.search(folder)
    return None if found is None else HubName(Kind(found[1]), f"{found[2]}/{found[3]}", found[4])


def cached(name: HubName) -> Path | None:
    """Return the folder of a revision in the cache, if its weights or tables are there; never asks the hub."""
    with _explained(name):
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            folder = _snapshot(name, local_files_only=True)
        except LocalEntryNotFoundError:
            return None
    return folder if COMMIT.fullmatch(folder.name) and _has_the_large_files(folder, name.kind) else None


def _snapshot(name: HubName, *, local_files_only: bool = False) -> Path:
    """Return the folder of a revision in the cache, with all files that are read; raises the library's errors."""
    from huggingface_hub import snapshot_download

    patterns = list(FILES[name.kind])
    return Path(
        snapshot_download(
            name.repo,
            repo_type=name.kind.value,
            revision=name.revision,
            allow_patterns=patterns,
            local_files_only=local_files_only,
        )
    )


def _has_the_large_files(folder: Path, kind: Kind) -> bool:
    """Return whether a folder of the cache has all weights, or any table of a data set. The library returns a folder
    with any file in it, also after an interrupted download; a data set's tables are counted when it is read."""
    if kind is Kind.dataset:
        return any(folder.glob("data/**/*.parquet"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False  # a damaged one is downloaded again
        return all(is_plain_name(shard) and (folder / shard).is_file() for shard in shards)
    return any(folder.glob("**/*.safetensors"))


def look_up(name: HubName) -> Listing:
    """Ask the hub which files a download would fetch.

    Raises:
        HubError: there is no such repository or revision, or no access to it.
        UnreachableError: the hub gives no answer.
    """
    with _explained(name):
        from huggingface_hub import HfApi
        from huggingface_hub.constants import HF_HUB_CACHE
        from huggingface_hub.utils import filter_repo_objects

        api = HfApi()
        ask = api.model_info if name.kind is Kind.model else api.dataset_info
        info = ask(name.repo, revision=name.revision, timeout=TIMEOUT_S, files_metadata=True)
        files = {file.rfilename: file for file in info.siblings or []}
        wanted = [files[path] for path in filter_repo_objects(files, allow_patterns=list(FILES[name.kind]))]
        commit = str(info.sha)
        if not COMMIT.fullmatch(commit) or not all(map(is_path, files)):
            raise AnswerError(f"names the commit {commit!r:.60}, or files that are none")
        if name.is_pinned and commit != name.revision:
            raise AnswerError(f"gives commit {commit}, asked for {name.revision}")
    # Commits share files in the cache: they lie there by their contents.
    blobs = Path(HF_HUB_CACHE) / f"{name.kind.value}s--{name.repo.replace('/', '--')}" / "blobs"
    missing = {
        file.rfilename: file.size or 0
        for file in wanted
        if not (blobs / str(file.blob_id if file.lfs is None else file.lfs.sha256)).exists()
    }
    if not wanted:
        raise HubError(
            f"{name} holds no file that is read ({', '.join(FILES[name.kind][:2])} ...)", "name another repository"
        )
    contents = {file.rfilename: (file.size, None if file.lfs is None else file.lfs.sha256) for file in wanted}
    return Listing(commit, missing, len(wanted), contents)


def fetch(name: HubName) -> Path:
    """Download what is missing, and return the folder in the cache; its name is the commit.

    A commit that is in the cache is taken from there without asking the hub, and so is a branch when the hub gives no
    answer. Processes that fetch at the same time download each file once.

    Raises:
        HubError: see `look_up`; or there is too little space.
    """
    present = cached(name)
    if present is not None and name.is_pinned:
        return present
    try:
        listing = look_up(name)
    except UnreachableError:
        if present is None:
            raise
        return present
    _check_space(name, sum(listing.missing.values()))
    with _explained(name), _bars_on_terminals():
        expected.sizes = {path: size for path, (size, _) in listing.contents.items() if size is not None}
        try:
            folder = _snapshot(name)
        finally:
            expected.sizes = None
        if folder.name != listing.commit:
            raise AnswerError(f"gives commit {folder.name} after {listing.commit}")
        check_download(folder, {path: listing.contents[path] for path in listing.missing})
    return folder


def describe(name: HubName) -> str:
    """Return a sentence on what is in the cache and what a run would download.

    Raises:
        HubError: the hub says that there is no such repository or revision, or no access to it.
    """
    present = cached(name)
    if present is not None and name.is_pinned:
        return f"{name} is in the cache"
    try:
        listing = look_up(name)
    except UnreachableError as error:
        here = "is not in the cache" if present is None else f"is in the cache (commit {present.name[:12]})"
        return f"{name} {here}; {error.message}"
    what = f"{name} (commit {listing.commit[:12]})"
    if not listing.missing:
        return f"{what} is in the cache"
    size = sum(listing.missing.values())
    return f"{what}: a run downloads {len(listing.missing)} of {listing.count} files, {readable_size(size)}"


def push(folder: Path, repo: str, *, public: bool = False) -> str:
    """Upload a folder as a model; returns the address of the commit.

    Args:
        folder: of an exported policy.
        repo: `owner/name`; made if it does not exist.
        public: whether a repository that is made can be seen by everyone.

    Raises:
        HubError: the name is malformed, the folder has links out of it, there is no right to write, or the hub gives no
            answer.
    """
    name = parse_repo(repo)
    if (found := foreign_entry(folder)) is not None:
        raise HubError(f"nothing is uploaded: {found}", NO_FOREIGN_ENTRIES)
    with _explained(name), _bars_on_terminals():
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(name.repo, private=not public, exist_ok=True)
        done = api.upload_folder(repo_id=name.repo, folder_path=folder, commit_message=f"Upload {folder.name}")
        return str(done.commit_url)


def readable_size(size: int) -> str:
    """Return a number of bytes for people."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _check_space(name: HubName, needed: int) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE)
    there = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise HubError(
            f"{name} needs {readable_size(needed)} in {cache}, where {readable_size(free)} are free",
            "make room, or set HF_HOME to a folder on another disk",
        )


@contextmanager
def _bars_on_terminals() -> Iterator[None]:
    """Show the library's progress bars for the length of a block only if stderr is a terminal."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    hide = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if hide:
        disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            enable_progress_bars()


@contextmanager
def _explained(name: HubName) -> Iterator[None]:
    """Turn the library's errors in a block into sentences for people."""
    try:
        from huggingface_hub import errors

        watch()
    except ImportError as error:
        raise HubError(
            f"{name} needs the package huggingface_hub, which is not installed", "pip install 'embodyrl[hub]'"
        ) from error
    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(f"{name} is gated: {_token()}", f"accept its conditions at {_page(name)}, {_SIGN_IN}") from error
    except errors.RepositoryNotFoundError as error:
        hint = did_you_mean(name.repo, _similar(name), otherwise=f"look for the name at {_page(None)}")
        raise HubError(f"the hub has no {name.kind.value} {name.repo!r} ({_token()})", hint) from error
    except errors.RevisionNotFoundError as error:
        message = f"{name.repo} has no revision {name.revision!r}"
        raise HubError(message, f"name a branch, tag or commit of {_page(name)}") from error
    except errors.OfflineModeIsEnabled as error:
        message = f"{name} cannot be looked up, because HF_HUB_OFFLINE is set"
        raise UnreachableError(
            message, f"unset it, or copy the cache (HF_HOME) of a machine that has {name}"
        ) from error
    except (errors.HTTPError, OSError) as error:
        _raise_for(name, error)
    except HubError:
        raise
    except AnswerError as error:
        raise _no_answer(name, str(error)) from error
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, AssertionError) as error:
        # The library takes it for granted that answers have the form of the hub's.
        why = " ".join(str(error).split()) or type(error).__name__
        raise _no_answer(name, f"answers otherwise than a hub does ({type(error).__name__}: {why:.100})") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2", "httpcore", "httpcore2"):
            raise
        raise _no_answer(name, f"answers otherwise than a hub does ({type(error).__name__})") from error


def _no_answer(name: HubName, what: str) -> UnreachableError:
    return UnreachableError(
        f"the hub {_page(None)} {what}, asked for {name}",
        "check HF_ENDPOINT and the network (a page to sign in at answers so, too), and try again",
    )


_SIGN_IN = "then run `hf auth login` or set HF_TOKEN"


def _raise_for(name: HubName, error: Exception) -> NoReturn:
    """Raise the sentence for an answer of the hub, a broken connection or a full disk."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        raise HubError(f"the hub refuses {name} ({status}; {_token()})", f"use an account with the right, {_SIGN_IN}")
    why = " ".join(str(error).split()) or type(error).__name__
    is_connection = isinstance(error, ConnectionError | TimeoutError)
    if isinstance(error, OSError) and error.errno is not None and not is_connection:
        raise HubError(f"{name} could not be stored ({why})", "check the disk; what has come is kept") from error
    raise UnreachableError(
        f"the hub {_page(None)} gives no answer on {name} ({why:.200})",
        "check the network and HF_ENDPOINT, and try again; what has come is kept",
    ) from error


def _similar(name: HubName) -> list[str]:
    """Return names on the hub like that of a repository; none if it does not say."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    api, words = HfApi(), name.repo.partition("/")[2]
    search = api.list_models if name.kind is Kind.model else api.list_datasets
    try:
        return [found.id for found in search(search=words, limit=20)]
    except (HTTPError, OSError, ValueError, TypeError, LookupError, AttributeError):
        return []  # the error that led here says more


def _token() -> str:
    from huggingface_hub import get_token

    return "no token is set" if get_token() is None else "as the token that is set sees it"


def _page(name: HubName | None) -> str:
    from huggingface_hub.constants import ENDPOINT

    if name is None:
        return str(ENDPOINT)
    return f"{ENDPOINT}/{'datasets/' if name.kind is Kind.dataset else ''}{name.repo}"
