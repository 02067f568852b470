"""Chat files, line by line: what is read, and which line is named when one is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.training import chat_data

KEY = "recipe_args.train_data_path"
ROW = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello – ☃"}]}
GOOD = json.dumps(ROW)


@pytest.fixture
def write(tmp_path: Path):
    def write(content: str | bytes, name: str = "chat.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def refused(*files: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        chat_data.check_files(KEY, files)
    message = str(caught.value)
    assert message.startswith(f"{KEY}: {files[-1]} ")
    return message


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        (f"{GOOD}\n{GOOD}\n", "a.jsonl", 2),
        (f"{GOOD}\n\n  \n{GOOD}", "a.ndjson", 2),
        (f"{GOOD}\r\n{GOOD}\r\n", "a.JSONL", 2),
        (json.dumps(ROW, ensure_ascii=False), "a.jsonl", 1),
        (json.dumps([ROW, ROW, ROW], indent=2), "a.json", 3),
        (json.dumps(ROW, indent=2), "a.json", 1),
    ],
)
def test_good_files(write, text, name, count):
    path = write(text, name)
    chat_data.check_files(KEY, [path])
    assert chat_data.sample(KEY, [path], 10) == [ROW] * count


def test_sharegpt_rows(write):
    chat_data.check_files(KEY, [write('{"conversations": [{"from": "human", "value": "Hi"}]}\n')])


@pytest.mark.parametrize("text", ["", "\n\n", "   \n"])
def test_an_empty_file(write, text):
    assert refused(write(text)).endswith("is empty")


def test_an_empty_json_list(write):
    assert refused(write("[]", "a.json")).endswith("is empty")


@pytest.mark.parametrize(
    ("text", "line"), [("not json\n", 1), (f"{GOOD}\n{GOOD}\n{{'a': 1}}\n", 3), (f"{GOOD}\n\n{GOOD[:-1]}\n{GOOD}\n", 3)]
)
def test_a_line_that_is_not_json(write, text, line):
    message = refused(write(text))
    assert f"line {line} is not JSON: " in message
    assert "column" in message


def test_a_json_file_that_is_not_json(write):
    assert "line 2 is not JSON" in refused(write("[\n{]\n", "a.json"))


@pytest.mark.parametrize(
    "row",
    [
        '{"text": "Hi"}',
        '{"messages": []}',
        '{"messages": "Hi"}',
        '{"messages": ["Hi"]}',
        '{"messages": [{"role": "user", "content": "Hi"}, null]}',
        '{"messages": null}',
        "[]",
        '"text"',
        "7",
        "null",
    ],
)
def test_a_row_without_messages(write, row):
    message = refused(write(f"{GOOD}\n{row}\n"))
    assert "line 2 has no list of messages" in message
    assert '"messages": [{"role": "user"' in message


def test_the_second_file_is_checked_as_well(write):
    refused(write(GOOD, "a.jsonl"), write("", "b.jsonl"))


def test_bytes_that_are_not_utf8(write):
    assert "is not UTF-8 text" in refused(write(GOOD.encode() + b"\n\xff\xfe\n"))


def test_sample_takes_the_first_rows_over_all_files(write):
    first, second = write(f"{GOOD}\n{GOOD}\n", "a.jsonl"), write('{"messages": [{}]}\n', "b.jsonl")
    assert len(chat_data.sample(KEY, [first, second], 2)) == 2
    assert chat_data.sample(KEY, [first, second], 9) == [ROW, ROW, {"messages": [{}]}]
    assert chat_data.sample(KEY, [], 9) == []


def test_sample_reads_no_further_than_it_must(write):
    assert chat_data.sample(KEY, [write(f"{GOOD}\nnot json\n")], 1) == [ROW]


def test_local_files(write, tmp_path):
    path, parquet = write(GOOD), write("", "a.parquet")
    assert chat_data.local_files(KEY, str(path)) == [path]
    assert chat_data.local_files(KEY, [str(path), str(parquet)]) == [path]
    assert chat_data.local_files(KEY, str(tmp_path)) == [], "a folder of Parquet files is read by AutoModel"
    assert chat_data.local_files(KEY, "owner/dataset") == []


@pytest.mark.parametrize(
    "name",
    [
        "no-such.jsonl",
        "data/no-such.jsonl",
        "data/chats.parquet",
        "./owner/dataset",
        "/no/such/file.jsonl",
        "~/chat.jsonl",
        "a/b/c",
        "owner/",
        "./chat.jsonl",
    ],
)
def test_a_path_that_is_not_there(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^{KEY}: {name} does not exist"):
        chat_data.local_files(KEY, name)


def test_one_of_several_that_is_not_there(write, tmp_path):
    missing = tmp_path / "missing.jsonl"
    with pytest.raises(ConfigError, match=f"{missing} does not exist"):
        chat_data.local_files(KEY, [str(write(GOOD)), str(missing)])


def test_a_folder_of_json_files(write, tmp_path):
    write(GOOD)
    with pytest.raises(ConfigError, match=r"is a folder without \.parquet files; give the \.jsonl files"):
        chat_data.local_files(KEY, str(tmp_path))


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        (ROW, True),
        ({"messages": [{"role": "user", "content": "Hi"}]}, False),
        ({"messages": [{"role": "model", "content": "Hi"}]}, True),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hi"}]}, True),
        ({"conversations": [{"from": "human", "value": "Hi"}]}, False),
        ({"messages": None, "conversations": [{"from": "gpt", "value": "Hi"}]}, True),
    ],
)
def test_has_answer(row, answer):
    assert chat_data.has_answer(row) is answer


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085"])
def test_a_bare_unicode_line_end_is_named(tmp_path, separator):
    """AutoModel splits the text with str.splitlines, which cuts at these too."""
    path = tmp_path / "rows.jsonl"
    row = {"messages": [{"role": "user", "content": f"a{separator}b"}, {"role": "assistant", "content": "c"}]}
    path.write_text(json.dumps(row) + "\n" + json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"line 2 holds a bare U.2028"):
        chat_data.check_files("k", [path])


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "a"}, {"role": "alien", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "alien", "value": "b"}]},
    ],
)
def test_a_role_that_automodel_refuses_is_named(tmp_path, row):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match="line 1 has a message of role 'alien'"):
        chat_data.check_files("k", [path])
