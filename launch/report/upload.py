"""The upload of a trained model to the Hugging Face Hub: the calls, and one line for each thing that can go wrong."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ...comm.disk import say
from ...comm.errors import HeadraceError, SettingError
from ..config.run_checkpoints import ADAPTER, TrainedModel
from ..processes.child import print_message
from .model_card import write_card


class HubUnreachable(HeadraceError):
    """The Hub does not answer, or has failed."""


class Hub(Protocol):
    """The calls of `huggingface_hub.HfApi` that an upload makes."""

    def create_repo(self, repo_id: str, *, private: bool | None = None, exist_ok: bool = False) -> Any:
        """Make a repository; the result's `repo_id` has the user's name."""
        ...

    def repo_info(self, repo_id: str) -> Any:
        """Facts about a repository, such as `private`."""
        ...

    def upload_folder(self, *, repo_id: str, folder_path: str | Path, commit_message: str | None = None) -> Any:
        """Add a commit with all files of a folder."""
        ...


class PushRequest(NamedTuple):
    """A model, and the name of its repository."""

    model: TrainedModel
    name: str

    @classmethod
    def of(cls, word: str, name: str, *, is_adapter: bool) -> "PushRequest":
        """Find the model of a word, or its adapter alone; raises `SettingError` for a mistake."""
        _check_name(name)
        model = TrainedModel.find(word)
        if not model.is_local:
            raise SettingError(f"{word} does not exist")
        if is_adapter and not model.is_adapter:
            adapter = model.beside / ADAPTER
            if not adapter.is_dir():
                raise SettingError(f"--adapter: {model.path} was trained without an adapter; {adapter} does not exist")
            model = model._replace(path=str(adapter))
        _check_weights(model)
        return cls(model, name)


def real_hub() -> Hub:
    """The Hub with the user's token. Raises `SettingError` without one."""
    from huggingface_hub import HfApi, get_token

    token = get_token()
    if not token:
        raise SettingError("the Hub wants a token: `hf auth login` stores one, or set HF_TOKEN")
    if not (token.isascii() and token.isprintable()):
        raise SettingError("the token of the Hub has a character that none has; check HF_TOKEN, or `hf auth login`")
    return HfApi()


def _check_weights(model: TrainedModel) -> None:
    """Raise `SettingError` if the weights are not those that a run has written in this checkpoint."""
    if model.run_dir is None:
        return
    from ...relay.checkpoints import CheckpointFolder

    checkpoints = CheckpointFolder(model.run_dir)
    if model.step not in checkpoints.whole():  # a run may export a model alone
        return
    if problem := checkpoints.problem(model.step, f"{Path(model.path).resolve().name}/*.safetensors"):
        raise SettingError(f"{checkpoints.path(model.step)} {problem}; take another checkpoint")


def _check_name(name: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise SettingError(f"{name!r} is not a name of the Hub: {_first_line(error)}") from error


def push(request: PushRequest, hub: Hub, *, is_private: bool, is_update: bool) -> None:
    """Make the repository, write the card, and upload the folder.

    is_private: the repository is to be private. is_update: it may exist. Raises `SettingError`, and `HubUnreachable`.
    """
    from huggingface_hub.errors import HFValidationError, HTTPError  # pyright: ignore[reportPrivateImportUsage]

    model = request.model
    repository = None
    try:
        repository = hub.create_repo(request.name, private=is_private or None, exist_ok=is_update)
        name = str(repository.repo_id)
        if is_private and is_update and not hub.repo_info(name).private:
            raise SettingError(f"--private: {name} exists and is public, so nothing is uploaded")
        _write_card(model, name)
        say(f"uploading {model.path} to {name}")
        message = f"Trained with Headrace for {model.step} steps" if model.step else "Published with Headrace"
        hub.upload_folder(repo_id=name, folder_path=model.path, commit_message=message)
    except (HTTPError, OSError, HFValidationError) as error:
        raise _explained(error, request, has_begun=repository is not None) from error
    if base := _local_base(model):
        print_message(f"warning: adapter_config.json names the base model by a folder of this machine, {base}")
    say(f"{repository} has {model.path}")


def _write_card(model: TrainedModel, name: str) -> None:
    """The card gets the name in the Hub. Without a new card the folder is uploaded with the one that it has."""
    try:
        write_card(model, name)
    except SettingError as error:  # a run of another version of the program has other settings
        print_message(f"warning: the model card is not written: {model.recipe_file}: {error}")
    except OSError as error:
        print_message(f"warning: the model card is not written: {error}")


def _explained(error: Exception, request: PushRequest, *, has_begun: bool) -> HeadraceError:
    """One line about an error of the Hub, of the way to it, or of the files. has_begun: the repository is there."""
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    name = request.name
    status = getattr(getattr(error, "response", None), "status_code", None)
    refusals = {
        401: "the Hub does not accept the token; `hf auth login` stores another one",
        403: f"the token may not write to {name}: it needs write access, and the name has to be yours or your organization's",
        404: f"the Hub has no user or organization for {name}, or the token may not see it",
        409: f"{name} exists already on the Hub; take another name, or --update to add a commit to it",
    }
    if status in refusals:
        return SettingError(refusals[status])
    if status is not None and status < 500:
        return SettingError(f"the Hub refuses {name}: {_first_line(getattr(error, 'server_message', None) or error)}")
    hint = "; --update continues the upload" if has_begun else ""
    if not isinstance(error, HTTPError | ConnectionError | TimeoutError):
        return SettingError(f"{request.model.path} cannot be uploaded: {_first_line(error)}{hint}")
    where = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    return HubUnreachable(f"the Hub at {where} cannot be reached: {_first_line(error)}{hint}")


def _local_base(model: TrainedModel) -> str:
    """The folder that an adapter names as its base model, which others do not have."""
    with suppress(OSError, ValueError, AttributeError):
        config = json.loads((Path(model.path) / "adapter_config.json").read_text(encoding="utf-8"))
        base = str(config.get("base_model_name_or_path") or "")
        return base if Path(base).is_absolute() or Path(base).exists() else ""
    return ""


def _first_line(error: Exception | str) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
