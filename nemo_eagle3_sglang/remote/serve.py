"""``nemo-eagle3-sglang serve-target``: loads the target and answers until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence

import torch
from aiohttp import web

from nemo_eagle3_sglang.contracts import BackendRequest
from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.remote import token
from nemo_eagle3_sglang.remote.answer import TargetEngine
from nemo_eagle3_sglang.remote.app import Front

logger = logging.getLogger(__name__)

# What is under way when the server is told to stop may take this long to be finished.
GRACE_SECONDS = 20.0


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def serve_command(args: Namespace, flags: list[str]) -> int:
    """Run the command line ``serve-target``; ``flags`` are SGLang's.

    Raises:
        ConfigError: See :func:`serve`.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.engine == "hf" and args.dtype not in ("auto", *DTYPES):
        raise ConfigError(f"--dtype {args.dtype}: write auto or one of {', '.join(DTYPES)}")
    if args.buffer_gib <= 0 or not 0 <= args.port < 2**16:
        raise ConfigError("--buffer-gib is above 0, --port from 0 to 65535")
    default = torch.bfloat16 if device.type == "cuda" else torch.float32
    request = BackendRequest(
        target=args.target,
        device=device,
        dtype=DTYPES.get(args.dtype, default),
        trust_remote_code=args.trust_remote_code,
        capture=args.capture,
        self_check=not args.no_self_check,
    )
    if args.engine == "sglang":
        flags = [*flags, "--dtype", args.dtype, *(["--trust-remote-code"] if args.trust_remote_code else [])]
    ids = args.aux_layer_ids
    return serve(args.engine, request, args.host, args.port, args.token_file, ids, args.buffer_gib, flags)


def serve(
    engine: str,
    request: BackendRequest,
    host: str,
    port: int,
    token_file: str | None,
    aux_layer_ids: list[int] | None,
    buffer_gib: float,
    flags: Sequence[str],
) -> int:
    """Serve ``request.target``.

    Args:
        engine: ``sglang`` or ``hf``.
        request: Target, device, dtype, capture and self-check.
        host: IP address to listen on.
        port: Port; 0 for a free one.
        token_file: See ``token.py``.
        aux_layer_ids: Layers to capture; ``None`` for the default ones.
        buffer_gib: Of rows that wait to be fetched, at most.
        flags: SGLang's own command line.

    Returns:
        The exit status: 0 when told to stop, 1 when the engine ended by itself.

    Raises:
        ConfigError: Whatever the user can mend.
    """
    secret = token.find(token_file, "--token-file")
    token.check_address(host, secret)
    if engine == "hf" and flags:
        raise ConfigError(f"serve-target --engine hf takes no {flags[0]}; SGLang's flags go with --engine sglang")
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(message)s")
    logging.getLogger("nemo_eagle3_sglang").setLevel(logging.INFO)
    loop = asyncio.new_event_loop()
    target = _open(engine, request, aux_layer_ids, buffer_gib, flags, loop)
    try:
        return loop.run_until_complete(_answer(target, host, port, secret))
    finally:
        target.close()
        loop.close()


def _open(
    engine: str,
    request: BackendRequest,
    aux_layer_ids: list[int] | None,
    buffer_gib: float,
    flags: Sequence[str],
    loop: asyncio.AbstractEventLoop,
) -> TargetEngine:
    if engine == "hf":
        from nemo_eagle3_sglang.remote.hf_engine import HFEngine

        return HFEngine(request, aux_layer_ids)
    from nemo_eagle3_sglang.remote.sglang_engine import SGLangEngine

    return SGLangEngine(request, aux_layer_ids, flags, int(buffer_gib * 2**30), loop)


async def _answer(target: TargetEngine, host: str, port: int, secret: str | None) -> int:
    """Listen until a signal comes or the engine ends, and let what is under way be finished."""
    # Nothing is decompressed, not even to be refused.
    runner = web.AppRunner(
        Front(target, secret).app(), access_log=None, shutdown_timeout=GRACE_SECONDS, auto_decompress=False
    )
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    card = target.card
    bound = runner.addresses[0][1]
    shown = f"[{host}]" if ":" in host else host
    print(
        f"{card.name} on {card.engine}: {card.info.num_hidden_layers} layers, aux layers {card.plan.trained}, "
        f"{str(card.dtype).removeprefix('torch.')}, sequences up to {card.limit} tokens\n"
        f"Ready. In the recipe: target_model_backend: remote, remote_urls: [http://{shown}:{bound}]",
        flush=True,
    )
    while not stop.is_set() and target.alive():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 1.0)
    # New connections are refused from here on.
    await runner.cleanup()
    if stop.is_set():
        return 0
    logger.error("SGLang's engine has ended; see its own error above")
    return 1
