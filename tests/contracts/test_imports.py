"""Who imports whom: the package without sglang, without nemo_automodel, without torch; and nothing that unpickles."""

from __future__ import annotations

import ast
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import nemo_eagle3_sglang

PACKAGE = Path(nemo_eagle3_sglang.__file__).parent
REPO = PACKAGE.parent
MODULES = sorted(m.name for m in pkgutil.walk_packages([str(PACKAGE)], "nemo_eagle3_sglang."))
# The one module that is AutoModel's subclass.
NEEDS_AUTOMODEL = "nemo_eagle3_sglang.training.recipe"

BLOCK = """\
import importlib, json, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")

BLOCKED, MODULES = json.loads(sys.argv[1])
sys.meta_path.insert(0, Block())
failed = {}
for module in MODULES:
    try:
        importlib.import_module(module)
    except ImportError as error:
        failed[module] = str(error)
print(json.dumps({"failed": failed, "loaded": sorted({name.partition(".")[0] for name in sys.modules})}))
"""


def import_all(blocked: list[str], modules: list[str]) -> dict:
    """Import ``modules`` in a fresh process in which the ``blocked`` packages do not exist."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCK, json.dumps([blocked, modules])],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=REPO,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_modules_are_found():
    assert {NEEDS_AUTOMODEL, "nemo_eagle3_sglang.engine.runner", "nemo_eagle3_sglang.cli"} <= set(MODULES)
    assert len(MODULES) > 25


def test_without_sglang_and_without_automodel():
    result = import_all(["sglang", "nemo_automodel"], MODULES)
    assert list(result["failed"]) == [NEEDS_AUTOMODEL]
    assert "nemo_automodel" in result["failed"][NEEDS_AUTOMODEL]


def test_the_base_import_is_light():
    """Start-up line, CLI dispatch and registry answer before torch is there; a look at the version costs nothing."""
    heavy = ["torch", "transformers", "pydantic", "omegaconf", "yaml"]
    names = ("", ".errors", ".startup", ".cli", ".training.launch")
    light = [f"nemo_eagle3_sglang{name}" for name in names]
    result = import_all(heavy, light)
    assert not set(heavy) & set(result["loaded"])
    assert result["failed"] == {}


def test_the_linter_keeps_its_contracts():
    """The layers and the two `forbidden` contracts of pyproject.toml."""
    pytest.importorskip("importlinter", reason="development dependency")
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=REPO,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kept, 0 broken" in done.stdout


UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def unsafe(source: str) -> list[str]:
    """Return what in ``source`` can run code out of a file: unpickling, torch.load, yaml.load without a safe loader."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").partition(".")[0] in UNSAFE_MODULES:
                found.append(str(node.module))
            found += [alias.name for alias in node.names if alias.name == "unsafe_load"]
        elif isinstance(node, ast.Call):
            call, keywords = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            if call in ("torch.load", "yaml.unsafe_load", "yaml.full_load", "eval", "exec", "os.system"):
                found.append(call)
            # config/load.py: a subclass of yaml.SafeLoader that refuses a key given twice.
            if call in ("yaml.load", "yaml.load_all") and keywords.get("Loader") != "_Loader":
                found.append(call)
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_unpickles(path):
    # The start-up hook executes AutoModel's own compiled module, as the import system would.
    allowed = ["exec", "exec"] if path.name == "startup.py" else []
    assert unsafe(path.read_text(encoding="utf-8")) == allowed


def test_the_yaml_loader_is_a_safe_one():
    import yaml

    from nemo_eagle3_sglang.config import load
    from nemo_eagle3_sglang.errors import ConfigError

    assert issubclass(load._Loader, yaml.SafeLoader)
    with pytest.raises(yaml.YAMLError):
        yaml.load("!!python/object/apply:os.getcwd []", Loader=load._Loader)
    with pytest.raises(ConfigError):
        load.load_config(REPO / "no" / "such.yaml")


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "import yaml\nyaml.load(f, Loader=yaml.Loader)",
        "import yaml\nyaml.load(f)",
        "from yaml import unsafe_load",
        "eval('1')",
    ],
)
def test_the_search_finds(source):
    assert len(unsafe(source)) == 1
