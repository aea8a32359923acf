"""Models by their name on the Hugging Face Hub: `hf:OWNER/NAME`, with `@REVISION` behind it where
it is not the main one; `hf:OWNER/NAME/FILE.gguf` for one file. What is there already is not fetched
again, and what was begun goes on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from twin.errors import ConfigError
from twin.text import said, shown

PREFIX = "hf:"
# what the engine reads of a model's folder, and what a prediction does
CONFIGURATION = ("*.json", "*.jinja")
WEIGHTS = (*CONFIGURATION, "*.safetensors")
OTHERS = ("*/*",)  # the same weights for other programs
_NAME = re.compile(
    r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>[\w./-]+\.gguf))?(?:@(?P<revision>[\w./-]+))?"
)


def local(model: str, *, weights: bool) -> str:
    """Where a model of that name lies on this computer, fetched if need be; a name without PREFIX
    as it is. Without `weights` only its description. Raises ConfigError.
    """
    if not model.startswith(PREFIX):
        return model
    found = _NAME.fullmatch(model)
    if found is None:
        raise ConfigError(
            f"{shown(model)}: write hf:OWNER/NAME, hf:OWNER/NAME@REVISION or "
            "hf:OWNER/NAME/FILE.gguf"
        )
    repo, file, revision = found["repo"], found["file"], found["revision"]
    hub = _library(model, repo, file)
    with _explained(model, repo, file):
        if file is not None:
            return str(hub.hf_hub_download(repo, file, revision=revision))
        return str(
            hub.snapshot_download(
                repo,
                revision=revision,
                allow_patterns=list(WEIGHTS if weights else CONFIGURATION),
                ignore_patterns=list(OTHERS),
            )
        )


def _library(model: str, repo: str, file: str | None) -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(
            f"{model} needs the package huggingface-hub: install the extra monotwin[hub]; or "
            f"{_by_hand(repo, file)}"
        ) from error
    return huggingface_hub


def _by_hand(repo: str, file: str | None) -> str:
    """The command that fetches the same where there is a network."""
    folder = repo.partition("/")[2]
    if file is not None:
        return f"run `hf download {repo} {file} --local-dir {folder}` and give {folder}/{file}"
    wanted = " ".join(f"'{one}'" for one in WEIGHTS)
    return (
        f"run `hf download {repo} --include {wanted} --exclude '{OTHERS[0]}' --local-dir {folder}` "
        f"and give {folder}"
    )


@contextmanager
def _explained(model: str, repo: str, file: str | None) -> Iterator[None]:
    """The library's errors as ours."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        reason = "its owner grants access on its page; ask there, then run `hf auth login`"
        raise ConfigError(f"{model}: {reason}") from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"{model}: has no such revision; see its page for branches") from error
    except errors.RepositoryNotFoundError as error:
        reason = "there is no such model, or it is private; check its name, or run `hf auth login`"
        raise ConfigError(f"{model}: {reason}") from error
    except errors.LocalEntryNotFoundError as error:  # nor in the cache
        raise ConfigError(
            f"{model}: is not on this computer, and the Hub cannot be reached; where it can, "
            f"{_by_hand(repo, file)} here"
        ) from error
    except errors.EntryNotFoundError as error:
        raise ConfigError(f"{model}: has no such file; see its page") from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError, ValueError) as error:
        raise ConfigError(
            f"{model}: cannot be fetched ({said(str(error), 160)}); run it again, what is there "
            "already stays"
        ) from error
