"""The commands behind the Makefile: ``python -m launch VERB --recipe X -- key=value ...``."""

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from components.core.problems import RecipeError
from launch import garbage
from launch.doctor import main as doctor
from launch.recipes import find_recipe, list_recipes, new_recipe, table

Verb = Callable[[argparse.Namespace], int]


def main(argv: list[str]) -> int:
    """Run one command.

    Returns:
        0 when all is well, 1 when a run failed, 2 when the recipe or the command line is wrong.
    """
    own, overrides = _split(argv)
    arguments = _parser().parse_args(own)
    arguments.overrides = overrides
    try:
        return VERBS[arguments.verb](arguments)
    except RecipeError as error:
        _report(error, arguments.verbose)
        return 2
    except KeyboardInterrupt:
        return 130


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launch", description=__doc__)
    parser.add_argument("verb", choices=sorted(VERBS))
    parser.add_argument("--recipe", default="quickstart", help="name in recipes/ or path to a YAML")
    parser.add_argument("--ngpu", type=int, help="processes on this machine")
    parser.add_argument("--on", default="slurm", help="slurm or skypilot")
    parser.add_argument("--nodes", type=int, help="machines of a cluster job")
    parser.add_argument("--dry", action="store_true", help="print the job instead of submitting it")
    parser.add_argument("--name", help="benchmark to run")
    parser.add_argument("--from", dest="source", help="recipe to copy")
    parser.add_argument("--sample", type=int, default=0, help="sample to inspect")
    parser.add_argument("--step", type=int, default=2, help="step whose memory is drawn")
    parser.add_argument("--all", action="store_true", help="show defaults and documentation too")
    parser.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    return parser


def _report(error: RecipeError, verbose: bool) -> None:
    count = len(error.problems)
    print(f"{count} problem{'s' if count > 1 else ''}:", file=sys.stderr)
    for problem in error.problems:
        print(f"  {str(problem)}".replace("\n", "\n  "), file=sys.stderr)
    if verbose:
        traceback.print_exc()


def _train(arguments: argparse.Namespace) -> int:
    from launch.train import train

    return train(find_recipe(arguments.recipe), arguments.overrides, arguments.ngpu)


def _check(arguments: argparse.Namespace) -> int:
    from launch.train import check

    print(check(find_recipe(arguments.recipe), arguments.overrides, arguments.ngpu))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from components.titan.device import use_cpu

    use_cpu()
    from launch.config.load import load_recipe
    from launch.config.show import show

    loaded = load_recipe(find_recipe(arguments.recipe), arguments.overrides)
    print(show(loaded, everything=arguments.all))
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    from launch.train import inspect

    print(inspect(find_recipe(arguments.recipe), arguments.overrides, arguments.sample))
    return 0


def _memory(arguments: argparse.Namespace) -> int:
    from launch.memory import memory

    path = find_recipe(arguments.recipe)
    return memory(path, arguments.overrides, arguments.ngpu, arguments.step)


def _launch(arguments: argparse.Namespace) -> int:
    from launch.cluster import launch

    return launch(
        find_recipe(arguments.recipe),
        arguments.overrides,
        arguments.on,
        arguments.nodes,
        arguments.ngpu,
        arguments.dry,
    )


def _recipes(arguments: argparse.Namespace) -> int:
    from launch.config.groups import RECIPES

    print(table(list_recipes(RECIPES)))
    return 0


def _new(arguments: argparse.Namespace) -> int:
    from launch.config.groups import RECIPES

    print(new_recipe(arguments.recipe, arguments.source or "quickstart", RECIPES))
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from tests.benchmarks.__main__ import main as bench

    flags = [f"--{text.partition('=')[0]}={text.partition('=')[2]}" for text in arguments.overrides]
    return bench([arguments.name, *flags] if arguments.name else ["--list"])


def _doctor(arguments: argparse.Namespace) -> int:
    return doctor()


VERBS: dict[str, Verb] = {
    "train": _train,
    "check": _check,
    "show": _show,
    "inspect": _inspect,
    "memory": _memory,
    "launch": _launch,
    "recipes": _recipes,
    "new": _new,
    "bench": _bench,
    "doctor": _doctor,
}


def entry() -> None:
    """Run the command line of this process."""
    # Output of ranks and launcher share the terminal; a buffered launcher would speak out of turn.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(_root())
    try:
        code = main(sys.argv[1:])
    except BrokenPipeError:
        # The reader of our output (`make show | head`) has seen enough; keep Python from
        # complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    garbage.leave_to_the_system()
    sys.exit(code)


def _root() -> Path:
    return Path(__file__).resolve().parents[1]
