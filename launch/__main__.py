"""``python -m launch``: see ``launch.cli``."""

from launch.cli import entry

if __name__ == "__main__":
    entry()
