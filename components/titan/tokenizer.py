"""``data.tokenizer`` as torchtitan's tokenizer config."""

from torchtitan.components.tokenizer import BaseTokenizer

from data.tokenizer import build_tokenizer, config_of, tokenizer_problems


def tokenizer_config(name: str) -> tuple[BaseTokenizer.Config, str]:
    """The config to build and the path it is built with.

    Args:
        name: "byte" or a directory with tokenizer.json.
    """
    return config_of(name), name


def vocabulary_size(name: str) -> int | None:
    """Token ids that the tokenizer can produce; None where it cannot be built at all."""
    if tokenizer_problems(name):
        return None
    return build_tokenizer(name).get_vocab_size()
