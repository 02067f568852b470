"""Bad input: a message that says what, with its value, and what to write; before weights load; nothing left behind.

All checks of a run are made by ``check_run`` in this process, which holds one import of AutoModel and of SGLang's
``ServerArgs``. The target's folder has no weights at all: a check that would load them fails.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
import yaml

from nemo_eagle3_sglang import backends
from nemo_eagle3_sglang.config import validate
from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.training import preflight

pytest.importorskip("nemo_automodel", reason="the checks render chats with AutoModel")
pytest.importorskip("sglang", reason="options are checked against the installed sglang")
from nemo_eagle3_sglang.training.recipe import TrainEagle3SGLangRecipe, check_run

CONTEXT, VOCAB, LAYERS = 512, 500, 8
GENERATION = "{% generation %}{{ m['content'] + ' <|im_end|>' }}{% endgeneration %}"
ANSWER = "{{ m['content'] + ' <|im_end|>' }}"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A target's folder without weights, and chats."""
    folder = tmp_path_factory.mktemp("model")
    tiny_models.save_target(folder / "target")
    (folder / "target/model.safetensors").unlink()
    tiny_models.write_chat(folder / "train.jsonl", 6)
    return folder


class Case:
    """One run that is to be refused: change ``config``, the target's ``folder`` or the data, then ask ``refused``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.target, self.out = folder, folder / "target", folder / "out"
        self.config: dict[str, Any] = {
            "recipe": "TrainEagle3Recipe",
            "recipe_args": {
                "target_model_name_or_path": str(self.target),
                "target_model_backend": "sglang",
                "train_data_path": str(folder / "train.jsonl"),
                "output_dir": str(self.out),
                "seq_length": 64,
                "micro_batch_size": 4,
                "num_epochs": 1,
                "ttt_steps": 3,
            },
            "optimizer": {"lr": 1.0e-3},
        }

    def edit_config(self, **changes: Any) -> None:
        path = self.target / "config.json"
        config = {k: v for k, v in (json.loads(path.read_text()) | changes).items() if v is not None}
        path.write_text(json.dumps(config))

    def edit_template(self, template: str | None) -> None:
        (self.target / "chat_template.jinja").unlink()
        tiny_models.save_tokenizer(self.target, VOCAB, template)

    def write_data(self, *rows: Any) -> Path:
        path = self.folder / "train.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    def run(self, **recipe_args: Any) -> None:
        config = copy.deepcopy(self.config)
        config["recipe_args"] |= recipe_args
        check_run(validate(config))

    def refused(self, **recipe_args: Any) -> str:
        before = sorted(self.folder.rglob("*"))
        with pytest.raises(ConfigError) as caught:
            self.run(**recipe_args)
        assert sorted(self.folder.rglob("*")) == before, "nothing may be left behind"
        return str(caught.value)


@pytest.fixture
def case(model: Path, tmp_path: Path, monkeypatch) -> Case:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    return Case(tmp_path)


def test_the_good_case_passes_and_leaves_nothing(case):
    before = sorted(case.folder.rglob("*"))
    case.run(draft_vocab_size=VOCAB, seq_length=CONTEXT, aux_layer_ids=[6, 0, 3], sglang_args={"dtype": "float32"})
    assert sorted(case.folder.rglob("*")) == before


# Missing or wrong CUDA


def test_cuda_asked_for_on_a_host_without(case):
    message = case.refused(device="cuda")
    assert message.startswith("recipe_args.device: 'cuda' needs a CUDA device, but torch ")
    assert "--recipe_args.device=cpu" in message


def test_a_gpu_that_torch_cannot_use(case, monkeypatch):
    monkeypatch.setattr(preflight, "_gpu_present", lambda: True)
    message = case.refused()
    assert message.startswith("recipe_args.device: 'auto' needs a CUDA device")
    assert "update it" in message or "install the CUDA build" in message


def test_cpu_asked_for_on_a_host_with_a_gpu(case, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "CUDA_VISIBLE_DEVICES= (empty)" in case.refused(device="cpu")


def test_sglangs_own_cpu_engine(case, monkeypatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert case.refused().startswith("SGLANG_USE_CPU_ENGINE is set")


# Versions that cannot work together


@pytest.fixture
def installed(monkeypatch):
    """Return a function that pretends versions; None is a distribution that is not installed."""

    def pretend(**versions: str | None) -> None:
        real = importlib.metadata.version

        def version(name: str) -> str:
            found = versions[name] if name in versions else real(name)
            if found is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(importlib.metadata, "version", version)

    return pretend


PAIR = "nemo-automodel 0.6.0 with sglang 0.5.17"


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({"sglang": None}, "target_model_backend: sglang needs sglang, which is not installed"),
        ({"sglang": "0.5.9"}, "sglang 0.5.9 is installed"),
        ({"sglang": "0.5.18"}, "sglang 0.5.18 is installed"),
        ({"sglang": "0.6.0"}, "sglang 0.6.0 is installed"),
        ({"transformers": "4.57.1"}, "but transformers 4.57.1 is installed; hidden states could be silently wrong"),
        ({"transformers": "5.18.0"}, "but transformers 5.18.0 is installed"),
        ({"torch": "2.9.0"}, "but torch 2.9.0 is installed"),
    ],
    ids=str,
)
def test_versions(case, installed, versions, words):
    installed(**versions)
    message = case.refused()
    assert words in message
    assert PAIR in message
    assert "pip install 'nemo-eagle3-sglang[all]'" in message


def test_versions_matter_to_the_engine_alone(case, installed):
    installed(sglang=None)
    case.run(target_model_backend="hf")


# The target's config


def test_no_dtype(case):
    case.edit_config(dtype=None)
    message = case.refused()
    assert f"{case.target}: config.json names no dtype" in message
    assert '"dtype": "bfloat16"' in message


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], None])
def test_an_architecture_without_draft(case, architectures):
    case.edit_config(architectures=architectures)
    message = case.refused()
    assert message.startswith("recipe_args.target_model_name_or_path: no EAGLE-3 draft class for ")
    assert (architectures[0] if architectures else "names no architectures") in message


def test_no_such_target(case):
    target = str(case.folder / "nothing")
    message = case.refused(target_model_name_or_path=target)
    assert message == f"recipe_args.target_model_name_or_path: there is no folder {target}"


def test_a_target_without_tokenizer(case):
    for path in case.target.glob("token*"):
        path.unlink()
    message = case.refused()
    assert message.startswith("recipe_args.target_model_name_or_path: ")
    assert "tokenizer" in message


# Aux ids


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, 3, 8], "8 is out of range, the target has layers 0..7"),
        ([1, 3, 7], "7 is the target's last layer, which SGLang does not capture when it serves"),
        ([1, 3, 3], "write exactly 3 different layer indices, e.g."),
        ([1, 3], "write exactly 3 different layer indices, e.g."),
        ([-1, 1, 3], "write a value >= 0"),
    ],
)
def test_aux_ids(case, ids, words):
    message = case.refused(aux_layer_ids=ids)
    assert message.startswith("recipe_args.aux_layer_ids")
    assert words in message


# Lengths and sizes


def test_seq_length_beyond_the_context(case):
    message = case.refused(seq_length=CONTEXT + 1)
    assert message.startswith("recipe_args.seq_length: 513 is longer than the target's context of 512 tokens")
    assert message.endswith("write at most 512")


@pytest.mark.parametrize("name", ["max_total_tokens", "context_length"])
def test_seq_length_beyond_what_sglang_is_given(case, name):
    """On a GPU the KV pool's size is known after the weights; where the YAML gives it, it is known before."""
    message = case.refused(sglang_args={name: 63})
    assert message.startswith("recipe_args.seq_length: 64 is longer than")
    assert f"raise recipe_args.sglang_args.{name}" in message


def test_two_sizes_of_the_kv_pool(case):
    message = case.refused(kv_pool="auto", sglang_args={"max_total_tokens": 4096})
    assert message.startswith(
        "recipe_args.kv_pool: auto sizes the pool, and sglang_args.max_total_tokens: 4096 does too"
    )


def test_draft_vocabulary_beyond_the_targets(case):
    message = case.refused(draft_vocab_size=VOCAB + 1)
    assert message.startswith("recipe_args.draft_vocab_size: 501 is larger than the target's vocabulary of 500")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lk_loss_type": "alpha"}, "lk_loss_type"),
        ({"target_model_backend": "colocated"}, "the supervision comes from AutoModel"),
    ],
)
def test_flat_trainer_where_it_cannot_be(case, change, reason):
    message = case.refused(trainer="flat", **change)
    assert message.startswith("recipe_args.trainer: flat is not possible")
    assert reason in message


def test_world_size(case, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    message = case.refused(sglang_args={"tp_size": 3})
    assert "tp_size: 3 GPUs share a target, this job has 4 processes" in message
    assert "--nproc-per-node 3" in message


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"mem_fraction_statc": 0.5}, "mem_fraction_statc: the installed sglang has no such argument (did you mean "),
        ({"tp_size": 2}, "tp_size: 2 GPUs share a target, this job has 1 processes"),
        ({"tp_size": "two"}, "tp_size: 'two' is no number of GPUs"),
        ({"ep_size": 2}, "ep_size: 2 does not divide tp_size: 1"),
        ({"pp_size": 2}, "pp_size: 2 cannot be set, the target is sharded over the GPUs of one group by tp_size"),
        ({"quantization": "fp8"}, "quantization: 'fp8' runs in SGLang's GPU kernels"),
        ({"speculative_algorithm": "EAGLE3"}, "the target runs alone; remove it"),
        ({"dtype": "float64"}, "dtype: float64 is not a dtype that SGLang computes in; use one of auto, half"),
        ({"mem_fraction_static": 1.5}, "mem_fraction_static: 1.5"),
        ({"mem_fraction_static": "half"}, "mem_fraction_static: 'half'"),
    ],
    ids=str,
)
def test_sglang_args(case, option, words):
    message = case.refused(sglang_args=option)
    assert message.startswith("recipe_args.sglang_args.")
    assert words in message


def test_a_misspelt_key(case):
    message = case.refused(sequence_length=64)
    assert "recipe_args.sequence_length = 64: unknown key (did you mean 'seq_length'?)" in message


# Data


@pytest.mark.parametrize("key", ["train_data_path", "val_data_path"])
def test_no_data_file(case, key):
    path = str(case.folder / "nothing.jsonl")
    assert case.refused(**{key: path}) == f"recipe_args.{key}: {path} does not exist"


def test_an_empty_data_file(case):
    path = case.write_data()
    assert case.refused() == f"recipe_args.train_data_path: {path} is empty"


def test_a_line_that_is_not_json(case):
    good = tiny_models.chat_rows(1)[0]
    path = case.write_data(good, good, '{"messages": [}')
    assert case.refused().startswith(f"recipe_args.train_data_path: {path} line 3 is not JSON: ")


def test_a_row_without_messages(case):
    for row in ({"text": "w9"}, {"messages": ["w9"]}, ["w9"]):
        path = case.write_data(tiny_models.chat_rows(1)[0], row)
        assert f"{path} line 2 has no list of messages" in case.refused()


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "robot", "content": "w9"}, {"role": "assistant", "content": "w9"}]},
        {"conversations": [{"from": "robot", "value": "w9"}, {"from": "gpt", "value": "w9"}]},
    ],
    ids=["role", "sharegpt role"],
)
def test_a_role_that_automodel_does_not_know(case, row):
    path = case.write_data(row)
    assert case.refused().startswith(f"recipe_args.train_data_path: {path} line 1 has a message of role 'robot'")


def test_a_target_with_random_weights(case):
    message = case.refused(sglang_args={"load_format": "dummy"})
    assert message.startswith("recipe_args.sglang_args.load_format: 'dummy' gives the target random weights")


def test_tokens_that_the_target_does_not_have(case):
    """A tokenizer with tokens added and a target that was not resized: SGLang reads zero rows for some of them."""
    tiny_models.save_tokenizer(case.target, 520)
    case.write_data({"messages": [{"role": "user", "content": "w9"}, {"role": "assistant", "content": "w510"}]})
    assert "gives token 510, the target has 500" in case.refused()


# The assistant mask. AutoModel takes it from {% generation %} where the template has that tag; where not, it renders
# the conversation up to each assistant turn and marks the difference.

TEMPLATES_WITH_A_MASK = {
    "tag": tiny_models.CHAT_TEMPLATE,
    "tag with dashes": tiny_models.CHAT_TEMPLATE.replace("{% generation %}", "{%- generation -%}"),
    "no tag": tiny_models.CHAT_TEMPLATE.replace(GENERATION, ANSWER),
}
TEMPLATES_WITHOUT_A_MASK = {
    "empty block": tiny_models.CHAT_TEMPLATE.replace(GENERATION, ANSWER + "{% generation %}{% endgeneration %}"),
    "block never reached": tiny_models.CHAT_TEMPLATE.replace("== 'assistant'", "== 'model'"),
    "no tag, answers left out": (
        "{# takes add_generation_prompt, as most do #}"
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] + ' ' }}{% endif %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("template", TEMPLATES_WITH_A_MASK.values(), ids=TEMPLATES_WITH_A_MASK)
def test_templates_that_mark_the_answer(case, template):
    case.edit_template(template)
    case.run()


@pytest.mark.parametrize("template", TEMPLATES_WITHOUT_A_MASK.values(), ids=TEMPLATES_WITHOUT_A_MASK)
def test_templates_that_mark_nothing(case, template):
    case.edit_template(template)
    message = case.refused()
    assert message.startswith("recipe_args.train_data_path: in the first 6 rows no token would be trained on")
    assert "chat template marks no assistant text" in message
    assert "{% generation %} … {% endgeneration %}" in message
    assert str(case.target) in message


def test_a_template_that_rewrites_earlier_turns(case):
    """Without the tag AutoModel cannot find the answers in it, and says what would help."""
    counting = "{% if messages|length > 1 %}w10 {% else %}w11 {% endif %}"
    case.edit_template(counting + tiny_models.CHAT_TEMPLATE.replace(GENERATION, ANSWER))
    message = case.refused()
    assert message.startswith("recipe_args.train_data_path: a row cannot be rendered with the target's chat template")
    assert "{% generation %}...{% endgeneration %}" in message


def test_no_template(case):
    case.edit_template(None)
    message = case.refused()
    assert "no chat template" in message
    assert "chat_template.jinja" in message


def test_a_template_that_is_not_jinja(case):
    case.edit_template("{% for")
    assert "cannot be rendered with the target's chat template" in case.refused()


@pytest.mark.parametrize("template", ["tag", "no tag"])
def test_rows_without_an_answer(case, template):
    case.edit_template(TEMPLATES_WITH_A_MASK[template])
    case.write_data({"messages": [{"role": "user", "content": "w9 w10"}]})
    message = case.refused()
    assert message.startswith("recipe_args.train_data_path: ")
    assert "assistant" in message
    assert "chat template marks no" not in message


def test_prompts_that_fill_the_row(case):
    long, short = {"role": "user", "content": "w9 " * 200}, {"role": "assistant", "content": "w10"}
    case.write_data({"messages": [long, short]})
    message = case.refused()
    assert "every prompt fills seq_length 64" in message
    assert "chat template marks no" not in message


# Output


def test_an_output_dir_under_a_file(case):
    path = f"{case.folder}/train.jsonl/out"
    message = case.refused(output_dir=path)
    assert message == f"recipe_args.output_dir: {path} cannot be written: Not a directory"


def test_a_checkpoint_dir_under_a_file(case):
    path = f"{case.folder}/train.jsonl/checkpoints"
    case.config["checkpoint"] = {"checkpoint_dir": path}
    assert case.refused() == f"checkpoint.checkpoint_dir: {path} cannot be written: Not a directory"


# Another distribution's backend, and the command


def test_a_backends_own_check_is_asked(case, monkeypatch):
    (case.folder / "toy_checked.py").write_text(
        "from nemo_eagle3_sglang.errors import ConfigError\n"
        "def build_runner(request): raise AssertionError('must not be built')\n"
        "def check_request(request): raise ConfigError(f'recipe_args.toy_args: {dict(request.options)} will not do')\n"
    )
    monkeypatch.syspath_prepend(str(case.folder))
    entry = importlib.metadata.EntryPoint("toy", "toy_checked:build_runner", backends.GROUP)
    monkeypatch.setattr(backends, "entry_points", lambda group: [entry])
    importlib.import_module("toy_checked")
    assert case.refused(target_model_backend="toy", toy_args={"x": 1}) == "recipe_args.toy_args: {'x': 1} will not do"


@pytest.mark.slow
def test_the_command_says_it_in_one_line_with_status_2(case):
    case.config["recipe_args"]["draft_vocab_size"] = VOCAB + 1
    path = case.folder / "run.yaml"
    path.write_text(yaml.safe_dump(case.config))
    program = Path(sys.executable).with_name("nemo-eagle3-sglang")
    done = subprocess.run(
        [program, "train", path], capture_output=True, text=True, timeout=240, cwd=case.folder, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: recipe_args.draft_vocab_size: 501 is larger than")
    # Libraries' own complaints at import time are theirs; what we raise comes without one.
    assert "ConfigError" not in done.stderr
    assert not case.out.exists()


def test_no_checkpoint_is_written_of_a_draft_that_diverged():
    draft = torch.nn.Linear(2, 2)
    run = TrainEagle3SGLangRecipe({})
    run.trainer_module = SimpleNamespace(draft_model=draft)
    run.runtime = SimpleNamespace(global_step=5)
    run.checkpointer = None
    run.save_checkpoint(epoch=1, step=5)
    draft.weight.data[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="step 5: the draft's weights are not finite"):
        run.save_checkpoint(epoch=1, step=5)
