"""The draft's ``config.json``, written so that a serving engine reads it as it is."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import torch
from transformers import PretrainedConfig

from nemo_eagle3_sglang.contracts import NUM_AUX_LAYERS

# SGLang's and vLLM's name of a Llama-style EAGLE-3 draft; AutoModel writes the name of its own training class.
ARCHITECTURE = "LlamaForCausalLMEagle3"


def make_servable(
    config: PretrainedConfig,
    aux_layer_ids: Sequence[int],
    capture: str = "serving",
    trained_ids: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Change a draft's config in place to what the EAGLE-3 loaders of SGLang and vLLM read.

    AutoModel clones the target's config for the draft. SGLang would build as many draft layers as the target has
    and load one of them, and would capture the default aux layers whatever the draft was trained on.

    Args:
        config: Config of a draft with one decoder layer.
        aux_layer_ids: The ids that lead SGLang to the states trained on, in the order of the draft's input columns.
        capture: ``serving`` (the ids are SGLang's), or ``residual`` (id i is the output of decoder layer i).
        trained_ids: The layers trained on, where SGLang's ids for them differ; id i is the output of layer i.
        dtype: Dtype of the weights, for a config that names none: SGLang would serve those in float16.
    """
    config.architectures = [ARCHITECTURE]
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        # transformers refuses a list of another length than num_hidden_layers. The draft's attention is full.
        config.layer_types = ["full_attention"]
    config.num_aux_hidden_states = NUM_AUX_LAYERS
    config.eagle_config = {
        "eagle_aux_hidden_state_layer_ids": list(aux_layer_ids),
        "use_aux_hidden_state": True,
        "capture": capture,
    }
    # vLLM reads this key first, and counts from the embedding: its i is the input of layer i, the output of i - 1.
    config.eagle_aux_hidden_state_layer_ids = [i + 1 for i in (trained_ids or aux_layer_ids)]
    if config.dtype is None:
        config.dtype = dtype
    _add_older_names(config)


def _add_older_names(config: PretrainedConfig) -> None:
    """Say dtype and RoPE also under the names of transformers 4, which vLLM and older readers look for.

    ``torch_dtype`` and ``rope_scaling`` are properties in transformers 5, aliases that are not written; an entry beside
    them in the instance's dictionary is. transformers 5 reads all of them back to what they say together.
    """
    written = vars(config)
    if config.dtype is not None:
        written["torch_dtype"] = str(config.dtype).removeprefix("torch.")
    rope = getattr(config, "rope_parameters", None)
    if rope:
        written["rope_theta"] = rope["rope_theta"]
        scaled = rope.get("rope_type", "default") != "default"
        written["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"} if scaled else None


def serve_command(target: str, draft: str) -> str:
    """Return the shell command that serves ``target`` with the draft folder ``draft`` in SGLang."""
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} \\\n"
        f"    --speculative-algorithm EAGLE3 --speculative-draft-model-path {shlex.quote(draft)} \\\n"
        "    --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    )
