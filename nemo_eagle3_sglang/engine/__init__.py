"""The frozen target in SGLang's real ``ModelRunner``, in this process.

The only folder that imports sglang, and only inside functions. Holds for sglang 0.5.16 and 0.5.17;
:mod:`nemo_eagle3_sglang.engine.versions` lists every internal that is used, with the releases it was seen in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_eagle3_sglang.contracts import BackendRequest
from nemo_eagle3_sglang.errors import ConfigError

if TYPE_CHECKING:
    from nemo_eagle3_sglang.engine.runner import SGLangRunner


def build_runner(request: BackendRequest) -> SGLangRunner:
    """Load ``request.target`` into SGLang; the factory of ``target_model_backend: sglang``."""
    from nemo_eagle3_sglang.engine.runner import SGLangRunner

    return SGLangRunner.build(request)


def check_request(request: BackendRequest) -> None:
    """Raise ``ConfigError`` for versions, devices or ``sglang_args`` that cannot work, before any weights load."""
    from nemo_eagle3_sglang.engine import server_args, versions

    versions.check_installed()
    server_args.check_options(request)
    if request.options.get("load_format") == "dummy":
        raise ConfigError(
            "recipe_args.sglang_args.load_format: 'dummy' gives the target random weights; there is nothing to learn "
            "from them. Remove it"
        )
