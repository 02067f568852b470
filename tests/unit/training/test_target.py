"""Where the target of a run lives."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_eagle3_sglang.config.schema import RecipeArgs
from nemo_eagle3_sglang.contracts import AuxPlan, TargetInfo
from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.training import target
from nemo_eagle3_sglang.training.recipe import served_by_sglang


def recipe_args(**changes: Any) -> RecipeArgs:
    base = {
        "target_model_name_or_path": "some/target",
        "target_model_backend": "sglang",
        "train_data_path": "train.jsonl",
        "output_dir": "out",
        "seq_length": 64,
        "micro_batch_size": 1,
        "num_epochs": 1,
        "ttt_steps": 2,
    }
    return RecipeArgs(**{**base, **changes})


TP2 = {"sglang_args": {"tp_size": 2}}
OTHER = {"sglang_python": "/other/python"}
HF = {"target_model_backend": "hf"}


@pytest.mark.parametrize(
    ("world", "changes", "process"),
    [
        (1, {}, "inline"),
        (1, {"target_process": "sidecar"}, "sidecar"),
        (1, OTHER, "sidecar"),
        (2, {}, "sidecar"),
        (4, TP2, "sidecar"),
        # An engine without global state may share the process with any trainer.
        (2, HF, "inline"),
        (2, {**HF, "target_process": "sidecar"}, "sidecar"),
    ],
)
def test_process(world, changes, process):
    assert target.choose_process(recipe_args(**changes), world) == process


@pytest.mark.parametrize(
    ("world", "changes", "words"),
    [
        (1, TP2, "tp_size: 2 GPUs share a target, this job has 1 processes"),
        (3, TP2, "tp_size: 2 GPUs share a target, this job has 3 processes"),
        (2, {**TP2, "target_process": "inline"}, "inline is not possible, .*tp_size: 2 ranks share it"),
        (2, {"target_process": "inline"}, "inline is not possible, this job has 2 processes"),
        (1, {**OTHER, "target_process": "inline"}, "inline is not possible, .*sglang_python: /other/python"),
    ],
)
def test_what_cannot_be(world, changes, words):
    with pytest.raises(ConfigError, match=words):
        target.choose_process(recipe_args(**changes), world)


class Source:
    info = TargetInfo(8, 4, 10)

    def __init__(self, plan: AuxPlan | None) -> None:
        self.plan = plan

    def plan_aux_layers(self, ids):
        return self.plan


def test_the_engines_plan_is_taken_and_said(caplog):
    caplog.set_level("INFO")
    plan = AuxPlan([0, 3, 5], [4, 6, 1])
    assert target.plan_aux_layers(Source(plan), [0, 3, 5]) == plan
    assert "Aux layers [0, 3, 5], written for the serving engine as [4, 6, 1]" in caplog.text


def test_an_engine_without_a_plan_is_taken_to_be_served_by_sglang(caplog):
    assert target.plan_aux_layers(Source(None), [5, 0, 3]) == AuxPlan([0, 3, 5], [0, 3, 5])
    assert "[5, 0, 3] are trained as [0, 3, 5]" in caplog.text


def test_sglangs_command_is_only_given_for_what_it_serves():
    plan = AuxPlan([1, 3, 4], [1, 3, 4])
    assert served_by_sglang("serving", plan)
    assert not served_by_sglang("residual", plan)
