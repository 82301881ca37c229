"""The exact versions the project was written against, and whether an environment has them.

``requirements.in`` is the one place where they are written down. Standard library alone: this runs
in environments where nothing else is known to exist.
"""

import importlib.util
import re
import sys
from importlib import import_module, metadata
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements.in"
MODULES = {"hydra-core": "hydra", "fla-core": "fla"}
"""Distribution -> the module it brings, where the two are named differently."""

_EXACT = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;#]+)")


def pins(requirements: Path = REQUIREMENTS) -> dict[str, str]:
    """Distribution name -> version, for every ``name==version`` line of ``requirements``."""
    lines = requirements.read_text(encoding="utf-8").splitlines()
    return {match[1]: match[2] for line in lines if (match := _EXACT.match(line))}


def installed(distribution: str) -> str | None:
    """The installed version, or None where the module cannot be found at all.

    A source tree on the path may carry no metadata; then the module says its own version. One that
    cannot be imported is "broken", and why.
    """
    module = MODULES.get(distribution, distribution)
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        pass
    try:
        return str(getattr(import_module(module), "__version__", "of unknown version"))
    except Exception as error:
        return f"broken: {reason_of(error)}"


def reason_of(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def mismatches(wanted: dict[str, str]) -> list[str]:
    """One sentence for every distribution that is missing or of another version.

    A local suffix does not count: ``2.14.1+cu130`` satisfies ``2.14.1``.
    """
    found = {name: installed(name) for name in wanted}
    return [
        f"{name}=={version} is needed, " + (f"found {found[name]}" if found[name] else "not found")
        for name, version in wanted.items()
        if (found[name] or "").partition("+")[0] != version
    ]


def main() -> int:
    """Exit status: 0 if this interpreter has every pinned version, else 2 and the lack is told."""
    problems = mismatches(pins())
    if problems:
        print(f"PYTHON={sys.executable} cannot run the project:", file=sys.stderr)
        for problem in problems:
            print(f"  {problem}", file=sys.stderr)
        print(
            "Install the locked packages there (pip install --require-hashes -r requirements.lock)"
            "\nor leave PYTHON out, and make installs them into .venv.",
            file=sys.stderr,
        )
    return 2 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
