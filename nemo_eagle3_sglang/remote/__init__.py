"""The target on other GPUs: a server that any number of trainers ask, and the trainer's side of it.

The server's environment needs sglang and not nemo_automodel, the trainer's the other way round; what they share is this
package and the frames between them. What is shipped are hidden states, not distributions: the draft vocabulary, and the
head at it, are the trainer's.

    serve, app       the command and its HTTP front
    sglang_engine    a real SGLang engine behind it; ``plugin`` is what runs in SGLang's own workers
    hf_engine        transformers behind it
    client           the trainer's side
    frames, rows     what travels; ``ask`` what SGLang is asked, ``card`` what identifies a target
"""

from __future__ import annotations

from typing import Any

from nemo_eagle3_sglang.contracts import BackendRequest, SupervisionSource
from nemo_eagle3_sglang.errors import ConfigError


def build_source(request: BackendRequest) -> SupervisionSource:
    """Connect to target servers; the factory of ``target_model_backend: remote``."""
    from nemo_eagle3_sglang.remote.card import read_config
    from nemo_eagle3_sglang.remote.client import RemoteProvider
    from nemo_eagle3_sglang.supervision.states import StatesSource

    provider = RemoteProvider(_remote(request), read_config(request.target), request.device)
    if request.seq_length > provider.max_sequence_length:
        provider.close()
        raise ConfigError(
            f"recipe_args.seq_length: {request.seq_length} is longer than the target server takes, "
            f"{provider.max_sequence_length}; lower it, or start the server with --context-length or a larger KV pool"
        )
    return StatesSource(provider, request.device)


def check_request(request: BackendRequest) -> None:
    """Raise ``ConfigError`` for addresses, rows or a token that cannot work; nobody is asked."""
    _remote(request)


def _remote(request: BackendRequest) -> Any:
    from nemo_eagle3_sglang.remote import token
    from nemo_eagle3_sglang.remote.client import Remote, check_url

    options = request.options
    urls = tuple(url.rstrip("/") for url in options["urls"])
    if not urls:
        raise ConfigError(
            "recipe_args.remote_urls: target_model_backend: remote needs the target servers, e.g. "
            "[http://127.0.0.1:8765]; start one with nemo-eagle3-sglang serve-target"
        )
    for url in urls:
        check_url(url)
    secret = token.find(options["token_file"], "recipe_args.remote_token_file")
    return Remote(
        urls, secret, options["timeout_s"], options["retries"], options["rows"], max(1, options["prefetch_depth"] + 1)
    )
