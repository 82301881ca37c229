"""A recipe whose values the tests know, and the answer to a mistake in it."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from components.core.problems import RecipeError
from launch.ready import Ready

CORPUS = Path(__file__).parent / "mistakes"
DEFAULTS = "defaults:\n- /base\n- _self_\n"

STEADY = """\
defaults:
- /base
- override /model: moe_debug
- override /data: stdlib
- _self_
hardware:
  ranks: 1
  device: cpu
model:
  n_layers: 4
  n_heads: 4
  n_kv_heads: 2
  n_experts: 8
  top_k: 2
  vocab_size: 320
  max_seq_len: 16k
training:
  seq_len: 2048
  local_batch_size: 2
  steps: 60
components:
  chunked_loss:
    enabled: true
    num_chunks: 8
"""

STEADY_GLM = """\
defaults:
- /base
- override /model: glm_flash_tiny
- override /data: stdlib
- _self_
hardware:
  ranks: 1
  device: cpu
training:
  seq_len: 2048
  local_batch_size: 1
  steps: 60
"""


@dataclass(frozen=True)
class Mistake:
    """An entry of the corpus.

    Attributes:
        name: what the user did.
        given: lines that the user wrote.
        line: which of them is at fault, or 0.
        says: words that the answer must hold.
    """

    name: str
    given: str
    line: int
    says: tuple[str, ...]


def corpus(name: str) -> list[Mistake]:
    """Entries of ``mistakes/<name>.txt``.

    An entry is a title (``=== what the user did``), the lines that were written, ``--- N`` with the
    number of the line at fault (none: not said), and the words of the answer, one part a line.
    """
    entries = re.split(r"^=== ", (CORPUS / f"{name}.txt").read_text(encoding="utf-8"), flags=re.M)
    return [_entry(text) for text in entries if text.strip()]


def _entry(text: str) -> Mistake:
    title, _, rest = text.partition("\n")
    given, line, says = re.split(r"^---(.*)\n", rest, maxsplit=1, flags=re.M)
    return Mistake(title, given, int(line or 0), tuple(says.strip().split("\n")))


def write_recipe(folder: Path, text: str | bytes, name: str = "mine.yaml") -> Path:
    """Write a recipe file."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def answer_to(recipe: Path, overrides: list[str] | None = None, ngpu: int | None = None) -> str:
    """What `make check` answers to a recipe that it refuses, with paths relative to its folder."""
    with pytest.raises(RecipeError) as refusal:
        Ready(recipe, overrides or [], ngpu, anywhere=True)
    return str(refusal.value).replace(f"{recipe.parent.resolve()}/", "")


JARGON = re.compile(
    r"DictConfig|ListConfig|NoneType|[Dd]ataclass|OmegaConf|Traceback|\bstruct\b|\bNone\b"
    r"|\bTrue\b|\bFalse\b|<class|Exception|object at 0x|token recognition|<EOF>"
)


def assert_answers(answer: str, says: tuple[str, ...]) -> None:
    """The words are there; one screen; nothing that only a Python programmer would know."""
    for words in says:
        assert words in answer
    # torchtitan's own sentences stay as they are.
    ours = "\n".join(line for line in answer.splitlines() if "is refused:" not in line)
    assert not JARGON.search(ours), JARGON.search(ours)
    assert len(answer.splitlines()) <= 24
