"""One real SGLang runner at a time: its state is global, so fixtures build, hand over and close it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import targets_table
import tiny_models

from nemo_eagle3_sglang.engine.runner import SGLangRunner
from nemo_eagle3_sglang.hf_runner import HFRunner


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--targets-table", type=Path, help="write the results of test_architectures.py to this page")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if (path := session.config.getoption("targets_table", None)) and exitstatus == 0:
        note = targets_table.write(path)
        session.config.pluginmanager.get_plugin("terminalreporter").write_line(f"\n{note}")


@pytest.fixture
def open_runner(tmp_path: Path) -> Iterator[Callable[..., SGLangRunner]]:
    """Build a runner of a tiny target that is closed when the test ends, whatever happens."""
    opened: list[SGLangRunner] = []

    def build(kind: str = "llama", request: dict[str, Any] | None = None, **overrides: Any) -> SGLangRunner:
        folder = tmp_path / f"target{len(opened)}"
        tiny_models.save_target(folder, kind, **overrides)
        opened.append(SGLangRunner.build(tiny_models.make_request(folder, **(request or {}))))
        return opened[-1]

    yield build
    for runner in opened:
        runner.close()


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, HFRunner]]:
    """The same tiny target in SGLang and in transformers."""
    folder = tiny_models.save_target(tmp_path_factory.mktemp(request.param), request.param)
    runner = SGLangRunner.build(tiny_models.make_request(folder))
    yield runner, HFRunner(tiny_models.make_model(request.param))
    runner.close()
