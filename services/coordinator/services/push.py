"""Implements `lockstep push`, which uploads an exported model to the Hugging Face Hub."""

import re
from pathlib import Path

from services.common.errors import InvalidInput, NotFound, Unavailable

_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def push(directory: Path, repository: str, *, is_public: bool) -> str:
    """Uploads all files of `directory` in one commit, and returns its URL. Makes the repository if there is none.

    Args:
        directory: A model that a run or `lockstep export` has written.
        repository: OWNER/NAME.
        is_public: Whether a new repository is public. One that is there stays as it is.

    Raises:
        NotFound: There is no exported model in `directory`.
        InvalidInput: `repository` is not an id, or you may not write there.
        Unavailable: The Hub is unreachable.
    """
    if not _ID.fullmatch(repository):
        raise InvalidInput(f"repository {repository} is not OWNER/NAME", field="repository")
    if not (directory / "config.json").is_file():
        raise NotFound(f"{directory} has no config.json: give runs/NAME/model or an export", field="directory")
    import huggingface_hub  # slow, and few commands need it
    from huggingface_hub.errors import HfHubHTTPError

    hub = huggingface_hub.HfApi()
    try:
        hub.create_repo(repository, private=not is_public, exist_ok=True)
        commit = hub.upload_folder(repo_id=repository, folder_path=directory, commit_message="A model of Lockstep")
    except HfHubHTTPError as error:
        message = f"you cannot write {repository} on the Hugging Face Hub ({_first_line(error)})"
        advice = "log in with `hf auth login`, or set HF_TOKEN to a token that may write there"
        raise InvalidInput(f"{message}: {advice}", field="repository") from error
    except Exception as error:  # of the HTTP library, which differs between versions of the Hub's client
        raise Unavailable(f"the Hugging Face Hub is unreachable ({_first_line(error)})", field="repository") from error
    return commit.commit_url


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
