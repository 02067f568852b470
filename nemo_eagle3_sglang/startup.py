"""What the start-up line ``nemo_eagle3_sglang_automodel.pth`` does in a process whose program is ``automodel``.

Python runs that line at every start. It looks at the name of the program and stops there unless this is ``automodel``,
``am`` or ``python -m nemo_automodel.cli.app`` (as torchrun starts it); ``NEMO_EAGLE3_SGLANG_NO_HOOK=1`` stops it there
too. Only then is this module imported, and :func:`install` changes one thing: the module ``nemo_automodel.cli.app``,
once it is loaded, asks :func:`nemo_eagle3_sglang.training.launch.main` first. That runs the commands that are ours,
here or in workers that it starts, and leaves every other to AutoModel. The form ``automodel finetune llm -c X.yaml`` of
AutoModel before 0.4, which 0.6 reads as a file named "finetune", is turned into ``automodel X.yaml`` on the way.

Why not ship a script named ``automodel``? AutoModel owns that name: when two distributions install the same file, the
installer and the order decide which one stays (uv kept AutoModel's each time), and uninstalling one takes the other's.
Here no file of AutoModel's is touched, the order of installation does not matter, and uninstalling takes the line away.

Standard library only: this runs before AutoModel's own imports, and argparse waits until there is something to parse.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader

APP_MODULE = "nemo_automodel.cli.app"
OLD_COMMAND = ["finetune", "llm"]


def install() -> None:
    """Arrange that AutoModel's command asks us first; calling it again does nothing (a .pth can run twice)."""
    if not any(isinstance(finder, _AppFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AppFinder())


def rewrite_argv(argv: list[str]) -> list[str]:
    """Return the arguments in today's form: ``finetune llm -c X.yaml …`` becomes ``X.yaml …``.

    Args:
        argv: The arguments after the program's name.

    Returns:
        ``argv`` itself unless its command is ``finetune llm``. Overrides keep their order; without ``-c`` what is left
        is passed on, so that ``--help`` and a forgotten config get AutoModel's own answer.
    """
    if not set(OLD_COMMAND).issubset(argv):
        return argv
    # The old command was an argparse parser with these arguments, so its rules (any order, -cX, --config=X) are kept.
    from argparse import ArgumentParser

    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("command")
    parser.add_argument("domain")
    parser.add_argument("-c", "--config", nargs="?")
    parser.add_argument("--nproc-per-node", "--nproc_per_node", nargs="?")
    parser.error = _refuse
    try:
        args, rest = parser.parse_known_args(argv)
    except ValueError:
        return argv
    if [args.command, args.domain] != OLD_COMMAND:
        return argv
    config = [args.config] if args.config else []
    nproc = ["--nproc-per-node", args.nproc_per_node] if args.nproc_per_node else []
    return [*config, *nproc, *rest]


def _refuse(message: str) -> None:
    raise ValueError(message)


class _AppFinder:
    """Meta-path finder for exactly ``nemo_automodel.cli.app``; every other import passes by after one comparison."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return AutoModel's own spec with our loader, or None for any other module."""
        if fullname != APP_MODULE:
            return None
        spec = PathFinder.find_spec(fullname, path)
        # A zipped or compiled AutoModel has another loader; it then runs as if this package were not installed.
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _AppLoader(spec.loader.name, spec.loader.path)
        return spec


class _AppLoader(SourceFileLoader):
    """Loads AutoModel's file as it is and puts our ``main`` before its own.

    The import system (the ``automodel`` script) and ``python -m`` (runpy) agree on one thing only, that the code of a
    module comes from ``get_code``, so that is what is replaced: by one line that calls :meth:`run`.
    """

    def get_code(self, fullname: str) -> object:
        """Return code that hands the module's namespace to :meth:`run`."""
        return compile("__spec__.loader.run(globals())", self.path, "exec")

    def run(self, namespace: dict) -> None:
        """Execute AutoModel's module in ``namespace``, asking us first wherever it would run a command."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _AppFinder)]
        code = super().get_code(self.name)
        if namespace["__name__"] == "__main__":
            # Under `python -m` the module's last line calls its main(), so all of it waits until we have looked.
            raise SystemExit(_main(lambda: exec(code, namespace)))
        exec(code, namespace)
        automodel_main = namespace["main"]
        namespace["main"] = lambda: _main(automodel_main)


def _main(automodel_main: Callable[[], int | None]) -> int | None:
    # In place: others hold the same list.
    sys.argv[1:] = rewrite_argv(sys.argv[1:])
    from nemo_eagle3_sglang.training.launch import main

    return main(automodel_main)
