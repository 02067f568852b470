"""Checks of a chat data set on disk, line by line, before a run starts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from nemo_eagle3_sglang.errors import ConfigError

# Columns that AutoModel's ChatDataset reads: OpenAI's and ShareGPT's.
COLUMNS = ("messages", "conversations")
ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = ("system", "human", "user", "gpt", "assistant", "chatgpt", "model", "bot")
JSON_LINES = (".jsonl", ".ndjson")
# What AutoModel takes for the assistant: OpenAI's name, and those that ShareGPT data sets use.
ASSISTANT_ROLES = ("assistant", "gpt", "chatgpt", "model", "bot")


def local_files(key: str, paths: str | Sequence[str]) -> list[Path]:
    """Return the local JSON files of a data path; an empty list for a hub id or a folder of Parquet files.

    Args:
        key: YAML key, for the error.
        paths: What the YAML gives.

    Raises:
        ConfigError: A local path that is not there, or a folder without Parquet files.
    """
    names = [paths] if isinstance(paths, str) else list(paths)
    files = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            if not any(path.glob("*.parquet")):
                raise ConfigError(f"{key}: {name} is a folder without .parquet files; give the .jsonl files themselves")
        elif path.is_file():
            files += [] if path.suffix == ".parquet" else [path]
        elif not _may_be_hub_id(name):
            raise ConfigError(f"{key}: {name} does not exist")
    return files


def _may_be_hub_id(name: str) -> bool:
    """Return whether ``name`` reads as ``owner/dataset``, as AutoModel decides it for paths that do not exist.

    A file's name, or a folder that is there, can only have been meant as a path.
    """
    if Path(name).suffix in (*JSON_LINES, ".json", ".parquet") or ("/" in name and Path(name).parent.is_dir()):
        return False
    return name.count("/") == 1 and all(name.split("/")) and not name.startswith((".", "/", "~"))


def check_files(key: str, files: Sequence[Path]) -> None:
    """Check every row of the files.

    Raises:
        ConfigError: An empty file, a line that is not JSON, or a row without messages; the line is named.
    """
    for path in files:
        count = 0
        for line, row in rows(key, path):
            count += 1
            if (role := _unknown_role(row)) is not None:
                raise ConfigError(
                    f"{key}: {path} line {line} has a message of role {role!r}; known are {', '.join(ROLES)} "
                    f"(in conversations: {', '.join(SHAREGPT_ROLES)})"
                )
            if not _has_messages(row):
                raise ConfigError(
                    f"{key}: {path} line {line} has no list of messages; each row is "
                    '{"messages": [{"role": "user", "content": …}, {"role": "assistant", "content": …}]}'
                )
        if not count:
            raise ConfigError(f"{key}: {path} is empty")


def _has_messages(row: Any) -> bool:
    columns = [row.get(name) for name in COLUMNS] if isinstance(row, dict) else []
    return any(isinstance(c, list) and c and all(isinstance(message, dict) for message in c) for c in columns)


def _unknown_role(row: Any) -> Any:
    """Return the first role that AutoModel's ChatDataset refuses, or None."""
    if not _has_messages(row):
        return None
    if row.get("messages"):
        roles, known = [message.get("role", "") for message in row["messages"]], ROLES
    else:
        roles, known = [turn.get("from", turn.get("role", "")) for turn in row["conversations"]], SHAREGPT_ROLES
    return next((role for role in roles if role not in known), None)


def has_answer(row: dict[str, Any]) -> bool:
    """Return whether a row has an assistant turn; without one there is nothing to learn in it."""
    turns = next((row[name] for name in COLUMNS if row.get(name)), [])
    return any(turn.get("role", turn.get("from")) in ASSISTANT_ROLES for turn in turns)


def rows(key: str, path: Path) -> Iterator[tuple[int, Any]]:
    """Yield ``(line number, row)`` of a JSON-lines file, or ``(index, row)`` of a JSON file.

    Raises:
        ConfigError: Not JSON, with the line; not UTF-8.
    """
    try:
        if path.suffix.lower() not in JSON_LINES:
            data = json.loads(path.read_text(encoding="utf-8"))
            yield from enumerate(data if isinstance(data, list) else [data], start=1)
            return
        with path.open(encoding="utf-8") as source:
            for number, text in enumerate(source, start=1):
                if len(text.strip().splitlines()) > 1:
                    raise ConfigError(
                        f"{key}: {path} line {number} holds a bare U+2028, U+2029 or U+0085, where AutoModel would "
                        "cut it; write it escaped (\\u2028), as json.dumps does"
                    )
                if text.strip():
                    yield number, _parse(key, path, number, text)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}: {path} is not UTF-8 text: {error.reason}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{key}: {path} line {error.lineno} is not JSON: {error.msg}") from error


def _parse(key: str, path: Path, number: int, text: str) -> Any:
    try:
        return json.loads(text.strip())
    except RecursionError as error:
        raise ConfigError(f"{key}: {path} line {number} is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{key}: {path} line {number} is not JSON: {error.msg} (column {error.colno})") from error


def sample(key: str, files: Sequence[Path], count: int) -> list[dict[str, Any]]:
    """Return the first ``count`` rows over all files."""
    return [row for _, row in islice((pair for path in files for pair in rows(key, path)), count)]
