"""Reads a string of the YAML or the command line as AutoModel's ConfigNode does.

AutoModel replaces environment variables in every string and then takes whatever looks like a Python literal for one.
Configuration is checked as read that way, so that what was checked is what trains.
"""

from __future__ import annotations

import ast
import os
import re
import warnings
from typing import Any

from nemo_eagle3_sglang.errors import ConfigError

_BRACED = re.compile(r"\$\{([^}]+)\}")
_BARE = re.compile(r"\$([A-Za-z_]\w*(?:\.\w+)*)", re.ASCII)
_WORDS = {"none": None, "None": None, "true": True, "True": True, "false": False, "False": False}
_LONGEST_LITERAL = 1000  # AutoModel leaves longer strings alone


def literal(text: str) -> Any:
    """Return what ``text`` stands for: None, a bool, a Python literal, or else the text itself."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > _LONGEST_LITERAL:
        return text
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text


def substitute(text: str) -> str:
    """Replace ``${VAR}``, ``${VAR,default}``, ``${oc.env:VAR}``, ``${oc.env:VAR,default}`` and ``$VAR``.

    As in AutoModel, dots are part of a variable's name, and ``$VAR`` is also replaced in what the braces gave.

    Raises:
        ConfigError: A variable without default is not set.
    """
    text = _BRACED.sub(lambda match: _lookup(match[1], match[0]), text)
    return _BARE.sub(lambda match: _lookup(match[1], match[0]), text)


def read(value: Any, path: str, problems: list[str]) -> Any:
    """Return ``value`` as AutoModel reads it, all the way down; variables that are not set go to ``problems``."""
    if isinstance(value, dict):
        return {key: _read_item(key, item, f"{path}.{key}".lstrip("."), problems) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [read(item, f"{path}[{index}]", problems) for index, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    try:
        return literal(substitute(value))
    except ConfigError as error:
        problems.append(f"{path} = {value!r}: {error}")
        return value


def _read_item(key: Any, value: Any, path: str, problems: list[str]) -> Any:
    names_code = key == "_target_" or str(key).endswith("_fn")  # AutoModel imports these instead
    return value if names_code and isinstance(value, str) else read(value, path, problems)


def _lookup(expression: str, token: str) -> str:
    name, comma, default = expression.strip().removeprefix("oc.env:").partition(",")
    name = name.strip()
    if name in os.environ:
        return os.environ[name]
    if comma:
        return default.strip()
    hint = " (${…} names an environment variable, not another key; repeat the value)" if "." in name else ""
    raise ConfigError(
        f"environment variable {name!r} is not set{hint}; export it, or write ${{{name},default}} in place of {token}"
    )
