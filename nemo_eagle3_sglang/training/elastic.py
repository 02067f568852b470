"""Starts the processes of a data-parallel job on this host with torch's elastic launcher, and waits for them.

AutoModel's launcher hands torchrun the path of the recipe's file below its own site-packages, which an editable install
does not have. Here the workers are ``python -m nemo_eagle3_sglang train …``, found as this module was found.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nemo_eagle3_sglang.errors import ConfigError

LAUNCHER_PID = "NEMO_EAGLE3_SGLANG_LAUNCHER_PID"
LOOPBACK = "127.0.0.1"
# torchrun's own variables for where the workers meet; who sets one gets what torchrun makes of it.
RENDEZVOUS_VARIABLES = ("PET_RDZV_BACKEND", "PET_RDZV_ENDPOINT", "PET_RDZV_ID", "PET_RDZV_CONF", "PET_MASTER_ADDR")
# They say per worker what one line of ours says at the end: "failed (exitcode …)", "Sending process … closing signal".
NOISY_LOGGERS = ("torch.distributed.run", "torch.distributed.elastic.multiprocessing.api")

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def start_workers(processes: int, arguments: Sequence[str], config_error_status: int) -> int:
    """Run ``nemo-eagle3-sglang ARGUMENTS`` in ``processes`` workers until all end or one fails, which ends the others.

    Args:
        processes: Workers on this host.
        arguments: The command of each, after the program's name.
        config_error_status: Exit status by which a worker says that the user can mend it.

    Returns:
        The exit status of the job: 0, ``config_error_status`` when the first worker that failed ended with it, 1 for
        any other failure, 128 and its number for a signal that ended the launcher.

    Raises:
        ConfigError: The workers cannot meet at the address in the environment.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError
    from torch.distributed.run import get_args_parser, run

    _hush_torchrun()
    os.environ[LAUNCHER_PID] = str(os.getpid())
    # torchrun makes a folder for its logs even when it writes none, and leaves it behind.
    with tempfile.TemporaryDirectory(prefix="nemo_eagle3_sglang_") as folder:
        log_dir = os.environ.get("PET_LOG_DIR") or folder
        try:
            run(get_args_parser().parse_args(torchrun_arguments(processes, arguments, log_dir)))
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode == config_error_status:
                return config_error_status  # its error is the last line on the screen
            how = f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else "failed"
            print(
                f"error: the process of rank {rank} {how}, its output is above; the others were ended", file=sys.stderr
            )
            return 1
        except SignalException as error:
            print(f"error: ended by {error.sigval.name}, and all {processes} processes with it", file=sys.stderr)
            return 128 + error.sigval
        except RendezvousConnectionError as error:
            raise ConfigError(
                f"the processes cannot meet: {error.__cause__ or error}; unset MASTER_ADDR, MASTER_PORT and PET_…, "
                f"then they meet at {LOOPBACK} and a free port"
            ) from error
    return 0


def torchrun_arguments(processes: int, arguments: Sequence[str], log_dir: str | Path) -> list[str]:
    """Return the command line of torchrun for :func:`start_workers`."""
    # As here: a script such as `automodel` does not look for modules in the working folder, `python -m` does.
    safe_path = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
    command = [sys.executable, *safe_path, "-u", "-m", "nemo_eagle3_sglang", *arguments]
    return [
        f"--nproc-per-node={processes}",
        f"--log-dir={log_dir}",
        *_rendezvous(),
        "--no-python",
        # torchrun fills ${local_rank} in, and reads $$ as $.
        *(word.replace("$", "$$") if position else word for position, word in enumerate(command)),
    ]


def end_with_launcher() -> None:
    """Have Linux kill this worker when its launcher dies in a way that leaves it no time to end its workers.

    That is SIGKILL, and a third Ctrl-C in a row. Without it the workers would go on, each holding a GPU.
    """
    launcher = os.environ.pop(LAUNCHER_PID, None)
    if launcher is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):
        raise SystemExit("error: the launcher of this process has ended")  # before the call above


def _rendezvous() -> list[str]:
    """Return where the workers meet: on this host at a port that the system picks, so that two jobs cannot collide."""
    if any(os.environ.get(name) for name in RENDEZVOUS_VARIABLES):
        return []
    address = os.environ.get("MASTER_ADDR") or LOOPBACK
    port = os.environ.get("MASTER_PORT") or "0"
    _check_can_meet(address, port)
    return [
        "--nnodes=1",
        "--rdzv-backend=c10d",
        "--rdzv-conf=is_host=1",
        f"--rdzv-endpoint={f'[{address}]' if ':' in address else address}:{port}",
        # Workers would else be told this host's full name, which a container often cannot resolve.
        f"--local-addr={address}",
        f"--rdzv-id=nemo_eagle3_sglang_{os.getpid()}",
    ]


def _check_can_meet(address: str, port: str) -> None:
    """Raise ``ConfigError`` unless this host can listen there; torchrun takes two minutes to find that out.

    On a port where something listens already it would even join that job.
    """
    problem: Exception = OSError("no address")
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError as error:
        found, problem = [], error
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                # As TCPStore does: connections of an ended job that still time out do not count.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((where[0], int(port), *where[2:]))
            return
        except (OSError, ValueError, OverflowError) as error:
            problem = error
    raise ConfigError(
        f"MASTER_ADDR={address}, MASTER_PORT={port}: the processes are started on this host and cannot meet there "
        f"({problem}); unset both, then they meet at {LOOPBACK} and a free port"
    ) from problem


def _hush_torchrun() -> None:
    """Keep torchrun's log from burying the error of a worker, unless the user chose its level."""
    if "LOGLEVEL" not in os.environ:
        for name in NOISY_LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
