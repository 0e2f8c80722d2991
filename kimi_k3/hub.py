"""Checkpoint files in a folder or in a Hub repository, through huggingface_hub's cache."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from kimi_k3.preflight import InsufficientResources, gigabytes

if TYPE_CHECKING:
    from kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM

# What stands beside the weights of a checkpoint and goes with them.
COMPANION_FILES = (
    "generation_config.json", "tokenizer_config.json", "tiktoken.model", "chat_constants.json", "encoding_k3.py",
    "preprocessor_config.json", "LICENSE",
)  # fmt: skip


class HubOptions(NamedTuple):
    """What huggingface_hub needs to know beside a repository's name."""

    revision: str | None = None
    cache_dir: str | Path | None = None
    token: str | bool | None = None
    local_files_only: bool = False


def local_folder(path_or_repo: str | Path) -> Path | None:
    """The folder that is meant, or None for a Hub repository. Raises FileNotFoundError for a path that is not there."""
    path = Path(path_or_repo).expanduser()
    if path.is_dir():
        return path
    text = str(path_or_repo)
    if isinstance(path_or_repo, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise FileNotFoundError(f"{text}: no such folder")
    return None


def resolve_file(
    path_or_repo: str | Path,
    filename: str,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> Path:
    """The path of one file of a folder, or of a Hub repository (downloaded into the cache if it is not there).

    Raises: FileNotFoundError naming the folder or repository, and, where the Hub cannot be reached, the cache.
    """
    folder = local_folder(path_or_repo)
    if folder is not None:
        if not (folder / filename).is_file():
            raise FileNotFoundError(f"{folder}: no {filename} in this folder")
        return folder / filename
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    options = HubOptions(revision, cache_dir, token, local_files_only)
    try:
        return Path(hf_hub_download(str(path_or_repo), filename, **options._asdict()))
    except LocalEntryNotFoundError as error:
        _raise_unreachable(str(path_or_repo), filename, options, error)
    except EntryNotFoundError as error:
        raise FileNotFoundError(f"{path_or_repo}: this Hub repository has no {filename}") from error


def resolve_files(path_or_repo: str | Path, filenames: Collection[str], options: HubOptions) -> Path:
    """The folder that holds the named files, after downloading those of a Hub repository that the cache lacks.

    Raises: InsufficientResources before a download that the cache's disk cannot take.
    """
    folder = local_folder(path_or_repo)
    if folder is not None:
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repo, patterns = str(path_or_repo), sorted(filenames)
    try:
        if not (options.local_files_only or _is_offline()):
            _check_disk(repo, patterns, options)
        return Path(snapshot_download(repo, allow_patterns=patterns, **options._asdict()))
    except LocalEntryNotFoundError as error:
        _raise_unreachable(repo, f"{len(patterns)} files", options, error)


def _is_offline() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def _cache_folder(options: HubOptions) -> Path:
    from huggingface_hub import constants

    return Path(options.cache_dir or constants.HF_HUB_CACHE)


def _raise_unreachable(repo: str, what: str, options: HubOptions, error: Exception) -> NoReturn:
    raise FileNotFoundError(
        f"{repo}: {what}: not in the cache {_cache_folder(options)}, and the Hub was not asked or not reached "
        f"(local_files_only={options.local_files_only}, HF_HUB_OFFLINE={int(_is_offline())}); "
        "a folder of that name does not exist either"
    ) from error


def _check_disk(repo: str, patterns: list[str], options: HubOptions) -> None:
    from huggingface_hub import snapshot_download

    files = snapshot_download(repo, allow_patterns=patterns, dry_run=True, **options._asdict())
    missing = [file for file in files if file.will_download]
    wanted = sum(file.file_size or 0 for file in missing)
    cache = _cache_folder(options).absolute()
    free = shutil.disk_usage(next(p for p in (cache, *cache.parents) if p.exists())).free
    if wanted > free:
        raise InsufficientResources(
            f"{repo}: {len(missing)} files of {gigabytes(wanted)} are to be downloaded, but the disk of {cache} has "
            f"{gigabytes(free)} free: name another cache_dir, or load some layers with layers=range(a, b)"
        )


def hub_checksums(path_or_repo: str, filenames: Collection[str], options: HubOptions) -> dict[str, str]:
    """SHA-256 of those files whose hash the Hub's metadata holds (it does for all weights)."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    infos = HfApi(token=options.token).get_paths_info(path_or_repo, list(filenames), revision=options.revision)
    return {info.path: info.lfs.sha256 for info in infos if isinstance(info, RepoFile) and info.lfs is not None}


def push_to_hub(
    model: KimiK3ForCausalLM,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload Kimi K3 checkpoint",
    max_shard_size: str | int = "5GB",
    **save_options: Any,
) -> str:
    """Save the model to a temporary folder and upload it to a Hub repository, created if it is not there.

    Needs as much free disk as the checkpoint takes, under the temporary folder. Returns: the commit's URL.
    """
    from huggingface_hub import HfApi

    from kimi_k3.saving import save_pretrained

    api = HfApi(token=token)
    with tempfile.TemporaryDirectory(prefix="kimi-k3-push-") as folder:
        save_pretrained(model, folder, max_shard_size, **save_options)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=folder, revision=revision, commit_message=commit_message
        )
    return str(commit.commit_url)
