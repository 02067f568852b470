"""The draft's ``config.json``, written so that a serving engine reads it as it is."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from transformers import PretrainedConfig

from nemo_eagle3_sglang.contracts import NUM_AUX_LAYERS

# SGLang's and vLLM's name of a Llama-style EAGLE-3 draft; AutoModel writes the name of its own training class.
ARCHITECTURE = "LlamaForCausalLMEagle3"


def make_servable(config: PretrainedConfig, aux_layer_ids: Sequence[int], capture: str = "serving") -> None:
    """Change a draft's config in place to what SGLang's EAGLE-3 loader reads.

    AutoModel clones the target's config for the draft. SGLang would build as many draft layers as the target has
    and load one of them, and would capture the default aux layers whatever the draft was trained on.

    Args:
        config: Config of a draft with one decoder layer.
        aux_layer_ids: The ids that lead the serving engine to the states trained on, in the order of the draft's
            input columns.
        capture: ``serving`` (the ids are SGLang's), or ``residual`` (id i is the output of decoder layer i).
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


def serve_command(target: str, draft: str) -> str:
    """Return the shell command that serves ``target`` with the draft folder ``draft`` in SGLang."""
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} \\\n"
        f"    --speculative-algorithm EAGLE3 --speculative-draft-model-path {shlex.quote(draft)} \\\n"
        "    --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    )
