"""Console script ``nemo-eagle3-sglang``: dispatch only, the work is in the modules it calls."""

from __future__ import annotations

import sys
from argparse import Action, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from typing import Any, NoReturn

import nemo_eagle3_sglang
from nemo_eagle3_sglang.errors import ConfigError, did_you_mean
from nemo_eagle3_sglang.training import launch

PROGRAM = "nemo-eagle3-sglang"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand in ``argv`` (by default the process's arguments) and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if rest and not args.takes_overrides:
        parser.error(f"{args.command} takes no {' '.join(rest)}")
    return launch.exit_status(lambda: args.handler(args, rest))


def build_parser() -> ArgumentParser:
    """Build the parser; each subcommand sets ``handler(args, rest)`` and whether it takes overrides as ``rest``."""
    parser = _Parser(
        prog=PROGRAM,
        description=nemo_eagle3_sglang.__doc__,
        epilog=f"{PROGRAM} COMMAND --help shows each command with examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {nemo_eagle3_sglang.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    _add_train(commands)
    _add_validate(commands)
    _add_plan(commands)
    _add_serve_target(commands)
    _add_report(commands)
    _add_backends(commands)
    return parser


def _add_train(commands: Any) -> None:
    parser = _add_command(
        commands,
        "train",
        "train a draft as CONFIG says, on GPUs or a CPU",
        f"""\
examples:
  {PROGRAM} train recipes/llama_eagle3_sglang.yaml
  {PROGRAM} train recipes/llama_eagle3_sglang.yaml --recipe_args.num_epochs=1 --recipe_args.seq_length=1024
  {PROGRAM} train recipes/llama_eagle3_sglang.yaml --nproc-per-node 2
  torchrun --nproc-per-node 2 -m nemo_eagle3_sglang train recipes/llama_eagle3_sglang.yaml

The same as `automodel CONFIG`, without AutoModel's launcher and without this package's start-up line.
Exit status: 0, 2 when the user can mend what is wrong, 1 for any other failure.""",
    )
    _add_config(parser)
    parser.add_argument(
        "--nproc-per-node",
        "--nproc_per_node",
        type=int,
        metavar="N",
        help="processes on this host (default: one a GPU)",
    )
    parser.set_defaults(handler=_train, takes_overrides=True)


def _add_validate(commands: Any) -> None:
    parser = _add_command(
        commands,
        "validate",
        "check CONFIG without loading a model and print it with overrides applied",
        f"""\
examples:
  {PROGRAM} validate recipes/llama_eagle3_sglang.yaml
  {PROGRAM} validate recipes/llama_eagle3_sglang.yaml --recipe_args.target_model_backend=hf > resolved.yaml

Exit status: 0 when CONFIG can be used, 2 when not, with the errors on stderr.""",
    )
    _add_config(parser)
    parser.set_defaults(handler=_validate, takes_overrides=True)


def _add_plan(commands: Any) -> None:
    parser = _add_command(
        commands,
        "plan",
        "say what CONFIG needs of each GPU's memory, from the target's config.json alone",
        f"""\
examples:
  {PROGRAM} plan recipes/llama_eagle3_sglang.yaml
  {PROGRAM} plan recipes/llama_eagle3_sglang.yaml --gpu-memory 141 --recipe_args.kv_pool=auto
  {PROGRAM} plan recipes/kimi_k2.7_code_eagle3.yaml --gpus 16 --gpu-memory 184

Of `target forward` and `draft activations` the larger counts, the rest is there all the time. An estimate: what is
counted is in nemo_eagle3_sglang/training/memory.py. Exit status: 0 when it fits, 1 when not, 2 for an error.""",
    )
    _add_config(parser)
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs, one process each (default: 1)")
    parser.add_argument(
        "--gpu-memory", type=float, default=80, metavar="GB", help="of one GPU, in 10^9 bytes (default: 80)"
    )
    parser.add_argument(
        "--supervised", type=float, default=1.0, metavar="SHARE", help="of the tokens that carry loss (default: 1)"
    )
    parser.set_defaults(handler=_plan, takes_overrides=True)


def _add_serve_target(commands: Any) -> None:
    parser = _add_command(
        commands,
        "serve-target",
        "serve a target's hidden states to trainers with target_model_backend: remote",
        f"""\
examples:
  {PROGRAM} serve-target --target meta-llama/Llama-3.1-8B-Instruct
  {PROGRAM} serve-target --target MODEL --tp-size 8 --host 0.0.0.0 --token-file token.txt
  {PROGRAM} serve-target --target MODEL --tp-size 16 --nnodes 2 --node-rank 0 --dist-init-addr HOST:5000
  {PROGRAM} serve-target --target MODEL --engine hf

With --engine sglang every other flag is SGLang's own (--tp-size, --quantization, --mem-fraction-static, …). Needs this
package and sglang, not nemo-automodel. /health and /metrics (Prometheus) are on the same port. Ctrl-C ends it when what
is under way is done. Exit status: 0, 2 when the user can mend what is wrong, 1 for any other failure.""",
    )
    parser.add_argument("--target", required=True, metavar="MODEL", help="folder or hub id of the target")
    parser.add_argument("--engine", choices=("sglang", "hf"), default="sglang", help="what runs it (default: sglang)")
    parser.add_argument("--host", default="127.0.0.1", help="IP address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8765, help="port, 0 for a free one (default: 8765)")
    parser.add_argument(
        "--token-file", metavar="FILE", help="secret that trainers must have; needed where others can reach the server"
    )
    parser.add_argument(
        "--aux-layer-ids", type=int, nargs=3, metavar="N", help="decoder layers to capture (default: [1, N//2-1, N-4])"
    )
    parser.add_argument("--capture", choices=("serving", "residual"), default="serving", help="see recipe_args.capture")
    parser.add_argument("--no-self-check", action="store_true", help="skip the comparison with SGLang's own capture")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code shipped with the target")
    parser.add_argument(
        "--dtype", default="auto", help="of the target; auto: as its config says, for hf bfloat16 on a GPU (default)"
    )
    parser.add_argument(
        "--buffer-gib", type=float, default=8.0, metavar="GIB", help="host memory of rows not fetched yet (default: 8)"
    )
    parser.set_defaults(handler=_serve_target, takes_overrides=True)


def _add_report(commands: Any) -> None:
    parser = _add_command(
        commands,
        "report",
        "draw one or several runs on one HTML page, from the files they wrote",
        f"""\
examples:
  {PROGRAM} report outputs/my_draft
  {PROGRAM} report outputs/lr_1e-4 outputs/lr_3e-4 --out compare.html

Loss, accuracy and simulated accept length against tokens, acceptance by position, time and memory split, versions and
configuration; several runs are drawn over each other. Read from metrics.jsonl and run.jsonl, while a run goes on too.
The file loads nothing from anywhere and runs no script. Needs matplotlib (the extra `report`).
Exit status: 0, 2 for a run that cannot be read.""",
    )
    parser.add_argument("runs", metavar="RUN_DIR", nargs="+", help="output_dir of a run")
    parser.add_argument("--out", metavar="FILE", help="HTML file to write (default: report.html in the first RUN_DIR)")
    parser.set_defaults(handler=_report, takes_overrides=False)


def _add_backends(commands: Any) -> None:
    parser = _add_command(
        commands,
        "backends",
        "list the target backends that the installed distributions register",
        f"""\
example:
  {PROGRAM} backends

Choose one with recipe_args.target_model_backend. Read from the distributions' metadata; no engine is imported.""",
    )
    parser.set_defaults(handler=_backends, takes_overrides=False)


def _train(args: Namespace, rest: list[str]) -> int:
    return launch.run(args.config, rest, nproc_per_node=args.nproc_per_node)


def _validate(args: Namespace, rest: list[str]) -> None:
    import yaml

    from nemo_eagle3_sglang.config.load import load_config

    _, merged = load_config(args.config, rest)
    print(yaml.safe_dump(merged, sort_keys=False, allow_unicode=True), end="")


def _plan(args: Namespace, rest: list[str]) -> None:
    from nemo_eagle3_sglang.config.load import load_config
    from nemo_eagle3_sglang.training.plan import make_plan

    if args.gpus < 1 or args.gpu_memory <= 0 or not 0 < args.supervised <= 1:
        raise ConfigError("--gpus is at least 1, --gpu-memory above 0, --supervised above 0 and at most 1")
    config, _ = load_config(args.config, rest)
    plan = make_plan(config, args.gpus, args.gpu_memory * 1e9, args.supervised)
    print("\n".join(plan.lines()))
    if not plan.fits:
        sys.exit(1)


def _serve_target(args: Namespace, rest: list[str]) -> int:
    try:
        from nemo_eagle3_sglang.remote.serve import serve_command
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"serve-target needs {error.name}; pip install 'nemo-eagle3-sglang[serve]' brings it"
        ) from error
    return serve_command(args, rest)


def _report(args: Namespace, rest: list[str]) -> None:
    from nemo_eagle3_sglang.report.page import write_report

    path = write_report(args.runs, args.out)
    count = len(args.runs)
    print(f"Report on {count} {'run' if count == 1 else 'runs'}: {path} ({path.stat().st_size / 1024:,.0f} KiB)")


def _backends(args: Namespace, rest: list[str]) -> None:
    from nemo_eagle3_sglang.backends import GROUP, registered

    entries = registered()
    if not entries:
        raise ConfigError(f"no installed distribution registers a backend under {GROUP}; reinstall {PROGRAM}.")
    rows = [(name, _distribution(entries[name]), entries[name].value) for name in sorted(entries)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, distribution, value in rows:
        print(f"{name:<{widths[0]}}  {distribution:<{widths[1]}}  {value}")


def _distribution(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "(unknown distribution)"


def _add_command(commands: Any, name: str, summary: str, epilog: str) -> ArgumentParser:
    return commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=epilog,
        formatter_class=RawDescriptionHelpFormatter,
        # An override such as --n=1 must not be taken for --nproc-per-node.
        allow_abbrev=False,
    )


def _add_config(parser: ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file; --key.sub=value overrides one of its keys")


class _Parser(ArgumentParser):
    """Argparse whose answer to an unknown command names the nearest known one."""

    def _check_value(self, action: Action, value: str) -> None:
        if action.dest == "command" and value not in action.choices:
            known = ", ".join(action.choices)
            self.error(f"unknown command {value!r}{did_you_mean(value, action.choices)}; known: {known}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        """Print ``error: …`` in the form of every other error of this package and exit with status 2."""
        self.exit(launch.CONFIG_ERROR_STATUS, f"error: {message}\nrun {self.prog} --help for usage\n")


if __name__ == "__main__":
    sys.exit(main())
