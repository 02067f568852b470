"""Let a target model write the answers of a chat data set, greedily.

A draft model learns to guess what its target says next, so the best training answers are the target's own. The last
assistant message of every conversation is written anew; the messages before it are the prompt and stay as they are.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

logger = logging.getLogger("regenerate_answers")

# Shorter pieces of an answer, such as "}" or "Yes.", may repeat.
SENTENCE_CHARS = 12
# An answer loops when more than this share of its phrases of this many words stood in it before.
PHRASE_WORDS = 4
MAX_REPEATED_SHARE = 0.3

Messages = list[dict[str, str]]


def read_prompts(path: str | os.PathLike[str]) -> list[Messages]:
    """Read the prompts of a JSONL file: every conversation up to its last user message, each prompt once.

    Args:
        path: Rows of ``{"messages": [{"role": ..., "content": ...}, ...]}``; a trailing answer is optional.

    Raises:
        ValueError: A row is not of that form, or there is none.
    """
    prompts: dict[str, Messages] = {}
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                prompt = _prompt_of(line, f"{os.fspath(path)}:{number}")
                prompts.setdefault(_key(prompt), prompt)
    if not prompts:
        raise ValueError(f"{os.fspath(path)!r} holds no prompt")
    return list(prompts.values())


def _prompt_of(line: str, where: str) -> Messages:
    """Return the messages of one row without its trailing answer."""
    try:
        messages = json.loads(line)["messages"]
        prompt = [{"role": str(each["role"]), "content": str(each["content"])} for each in messages]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f'{where}: not a row of {{"messages": [{{"role", "content"}}]}} ({error})') from error
    if prompt and prompt[-1]["role"] == "assistant":
        prompt.pop()
    if not prompt or prompt[-1]["role"] != "user":
        raise ValueError(f"{where}: the last message, or the one before the answer, must be the user's")
    return prompt


def _key(prompt: Messages) -> str:
    """Return what tells one prompt from another."""
    return json.dumps(prompt, sort_keys=True)


def read_answered(path: Path) -> set[str]:
    """Return the keys of the prompts that ``path`` already answers, and cut off a row that an interruption left torn.

    Args:
        path: An output file of this script; need not exist.

    Raises:
        ValueError: A row is not one of this script's.
    """
    if not path.exists():
        return set()
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        logger.info("%s ends in a torn row, which is written anew", path)
        os.truncate(path, len(whole))
    rows = whole.decode("utf-8").split("\n")
    return {_key(_prompt_of(row, f"{path}:{number}")) for number, row in enumerate(rows, start=1) if row.strip()}


def is_looping(text: str, max_repeats: int) -> bool:
    """Return whether ``text`` says one sentence over and over, or repeats much of its wording.

    Small models under greedy decoding fall into such loops. Only letters count, so that a list whose numbers alone
    change is a loop too.

    Args:
        text: An answer.
        max_repeats: Times that a sentence, a line or a list item may occur.
    """
    pieces = [" ".join(_words(piece)) for piece in re.split(r"[.!?;:]\s|\n", text)]
    sentences = Counter(piece for piece in pieces if len(piece) >= SENTENCE_CHARS)
    if any(count > max_repeats for count in sentences.values()):
        return True
    words = _words(text)
    phrases = [tuple(words[start : start + PHRASE_WORDS]) for start in range(len(words) - PHRASE_WORDS + 1)]
    return len(phrases) - len(set(phrases)) > MAX_REPEATED_SHARE * len(phrases)


def _words(text: str) -> list[str]:
    """Return the words of ``text`` in lower case, without digits."""
    return re.findall(r"[^\W\d_]+", text.lower())


def load_target(name: str, device: str, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the target and its tokenizer for batched greedy generation.

    Args:
        name: Folder or hub name of the target.
        device: Torch device.
        dtype: Torch dtype's name, or ``auto`` for the checkpoint's own.
    """
    # Generation continues the right end of a row, so that padding belongs to the left.
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
    defaults = model.generation_config
    eos = defaults.eos_token_id if defaults.eos_token_id is not None else tokenizer.eos_token_id
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    # Replaced, not updated: generate() fills every unset option from the model's defaults, and a repetition penalty
    # among them would bend greedy decoding away from what the draft model has to guess.
    model.generation_config = GenerationConfig(
        bos_token_id=defaults.bos_token_id, eos_token_id=eos, pad_token_id=tokenizer.pad_token_id
    )
    return model, tokenizer


@torch.inference_mode()
def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Messages], max_new_tokens: int
) -> list[str]:
    """Return the model's greedy answers to a batch of prompts.

    Args:
        model: The target.
        tokenizer: Its tokenizer, padding left.
        prompts: B prompts.
        max_new_tokens: Length limit of an answer; a longer one is cut.
    """
    # input_ids and attention_mask, both [B, S] int64.
    batch: Any = tokenizer.apply_chat_template(
        list(prompts), add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    ).to(model.device)
    output = model.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False, use_cache=True)
    return tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def regenerate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Messages],
    max_new_tokens: int,
    batch_size: int,
    max_repeats: int,
) -> Iterator[list[Messages]]:
    """Yield batch after batch the conversations that are worth keeping.

    Empty answers are dropped and so are those that loop; one that the length limit cut is kept.

    Args:
        model: The target.
        tokenizer: Its tokenizer, padding left.
        prompts: What to answer.
        max_new_tokens: Length limit of an answer.
        batch_size: Prompts per call of the model.
        max_repeats: Times that an answer may say the same sentence.
    """
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        texts = answer(model, tokenizer, batch, max_new_tokens)
        yield [
            [*prompt, {"role": "assistant", "content": text}]
            for prompt, text in zip(batch, texts, strict=True)
            if text.strip() and not is_looping(text, max_repeats)
        ]


def positive(text: str) -> int:
    """Parse a positive integer from the command line."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Let a target model write the last answer of every conversation, greedily.",
        epilog="A run that was interrupted goes on where it stopped when started again; prompts whose answers were "
        "dropped are tried again.\n\n"
        "examples:\n"
        "  python examples/regenerate_answers.py models/smollm2 examples/data/smollm2_chat.jsonl answers.jsonl\n"
        "  python examples/regenerate_answers.py my-org/my-target prompts.jsonl answers.jsonl \\\n"
        "      --device cuda --batch-size 64 --max-new-tokens 1024\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", help="folder or hub name of the target model")
    parser.add_argument("prompts", help='JSONL file of {"messages": [...]} rows; an answer at their end is replaced')
    parser.add_argument("output", help="JSONL file to write, or to go on with")
    parser.add_argument("--max-new-tokens", type=positive, default=160, help="cut answers here (default: %(default)s)")
    parser.add_argument("--batch-size", type=positive, default=16, help="prompts at a time (default: %(default)s)")
    parser.add_argument(
        "--max-repeats",
        type=positive,
        default=2,
        help="drop an answer that says a sentence more often than this (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="torch device (default: cuda where there is one, else cpu)",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float16", "float32"),
        default="auto",
        help="dtype to compute in (default: the checkpoint's)",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    output = Path(args.output)
    try:
        prompts = read_prompts(args.prompts)
        answered = read_answered(output)
    except (OSError, ValueError) as error:
        logger.error("error: %s", error)
        return 2
    waiting = [prompt for prompt in prompts if _key(prompt) not in answered]
    logger.info("%d prompts, %d of them answered already", len(prompts), len(prompts) - len(waiting))
    if not waiting:
        return 0
    model, tokenizer = load_target(args.target, args.device, args.dtype)
    output.parent.mkdir(parents=True, exist_ok=True)
    kept = 0
    batches = regenerate(model, tokenizer, waiting, args.max_new_tokens, args.batch_size, args.max_repeats)
    with open(output, "a", encoding="utf-8") as rows, tqdm(total=len(waiting), unit="prompt") as progress:
        for conversations in batches:
            rows.writelines(json.dumps({"messages": each}, ensure_ascii=False) + "\n" for each in conversations)
            rows.flush()
            kept += len(conversations)
            progress.update(min(args.batch_size, progress.total - progress.n))
    logger.info("Wrote %d answers to %s and dropped %d", kept, output, len(waiting) - kept)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
