"""Models by their hub id, through the local cache of `huggingface_hub`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from streamserve.errors import ConfigError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_METADATA_FILES = ["*.json", "*.jinja"]
_WEIGHT_FILES = ["*.safetensors"]


def is_hub_id(text: str) -> bool:
    """Whether `text` has the form `organisation/name`."""
    return _HUB_ID.fullmatch(text) is not None and not text.startswith(".")


def fetch_from_hub(hub_id: str, with_weights: bool, progress: Callable[[str, float], None]) -> Path:
    """Downloads what serving `hub_id` needs, or finds it in the cache, and returns its folder.

    Args:
        hub_id: `organisation/name`.
        with_weights: False leaves the weights out.
        progress: told that a download may be going on; the hub's own bars show how far it is.

    Raises:
        ConfigError: no such model, no permission, or neither cached nor reachable.
    """
    from huggingface_hub import errors, snapshot_download

    progress(f"fetching {hub_id}", 0.0)
    try:
        folder = snapshot_download(
            hub_id,
            allow_patterns=_METADATA_FILES + (_WEIGHT_FILES if with_weights else []),
            # Repositories keep other renderings of the same weights in subfolders.
            ignore_patterns=["*/*"],
        )
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"MODEL {hub_id}: access must be granted first; accept its terms on the hub and set HF_TOKEN."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"MODEL {hub_id}: no such model on the hub, or it is private; check the id, or set HF_TOKEN."
        ) from error
    except errors.HFValidationError as error:
        raise ConfigError(f"MODEL {hub_id}: not a hub id; give organisation/name or a local path.") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ConfigError(
            f"MODEL {hub_id}: no such path here, not in the hub's cache, and the hub cannot be reached; "
            "give a local folder or GGUF file, or fetch the model once with `hf download`."
        ) from error
    except (errors.HTTPError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"MODEL {hub_id}: the download failed ({reason}); try again.") from error
    progress(f"fetching {hub_id}", 1.0)
    return Path(folder)
