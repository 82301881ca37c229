"""A look at one packed sample: what it holds, where documents begin, what is ignored."""

from collections.abc import Iterable

import numpy as np

from data.loader import PackedLoader
from data.packing import IGNORED, Sample
from data.store import Split

_SHOWN_TOKENS = 160
_SHOWN_PIECES = 12


def describe(loader: PackedLoader, index: int) -> str:
    """Return a text about sample ``index`` >= 0 of ``loader``, and about its corpus.

    A finite loader's sample is shown with its padding. The loader's position does not move.

    Raises:
        ValueError: ``index`` is negative, or past the end of a finite loader.
    """
    end = loader.end
    if index < 0 or (end is not None and index >= end):
        legal = "0 or more" if end is None else f"0..{end - 1}"
        raise ValueError(f"sample: {index} does not exist; legal: {legal}")
    stream = loader.stream
    if loader.config.infinite:
        place = stream.shuffled_index(index)
        sample, count = stream.sample(place), stream.seq_len
    else:
        place, sample = index, stream.finite_sample(index)
        count = max(0, min(stream.seq_len, stream.epoch_tokens - index * stream.seq_len))
    lines = [
        *_corpus_lines(loader),
        "",
        f"sample {index:,} of {loader.config.split}",
        *_sample_lines(loader, place, count, sample),
        "",
        *_text_lines(loader, sample.input[:count]),
    ]
    return "\n".join(lines)


def _corpus_lines(loader: PackedLoader) -> Iterable[str]:
    corpus, store = loader.config.corpus, loader.store
    yield f"corpus      {corpus.kind}, fingerprint {store.digest}"
    yield f"cache       {store.directory}"
    yield (
        f"tokenizer   {corpus.tokenizer}, vocabulary {loader.tokenizer.get_vocab_size():,}, "
        f"largest id {store.max_id:,}"
    )
    splits: tuple[Split, ...] = ("train", "validation") if corpus.held_out else ("train",)
    for split in splits:
        documents = store.split(split, corpus.held_out)
        samples = documents.token_count / loader.stream.seq_len
        yield (
            f"{split:<11} {len(documents.chosen):,} documents, {documents.token_count:,} tokens, "
            f"{samples:,.1f} samples of {loader.stream.seq_len:,} tokens"
        )


def _sample_lines(loader: PackedLoader, place: int, count: int, sample: Sample) -> Iterable[str]:
    """Describe the sample at ``place`` of the stream, of which ``count`` tokens are no padding."""
    stream, store = loader.stream, loader.store
    start = place * stream.seq_len
    epoch, offset = divmod(start, stream.epoch_tokens)
    yield f"place       {place:,} in packed order"
    yield f"epoch       {epoch}, from token {offset:,} of {stream.epoch_tokens:,}"
    ignored = int(np.count_nonzero(sample.labels == IGNORED))
    yield f"ignored     {ignored:,} of {stream.seq_len:,} labels"
    if count < stream.seq_len:
        yield f"padding     {stream.seq_len - count:,} tokens, from {count:,} on"
    if not count:
        return
    pieces = stream.pieces(start, count)
    begins = np.cumsum(pieces.length) - pieces.length
    yield f"documents   {len(begins):,}"
    shown = zip(begins, *pieces, strict=True)
    for _, (at, document, begin, length) in zip(range(_SHOWN_PIECES), shown, strict=False):
        yield f"  at {at:>9,}  {store.name(document)}, tokens {begin:,}..{begin + length - 1:,}"
    if len(begins) > _SHOWN_PIECES:
        yield f"  and {len(begins) - _SHOWN_PIECES:,} more"


def _text_lines(loader: PackedLoader, tokens: np.ndarray) -> Iterable[str]:
    if len(tokens) <= 2 * _SHOWN_TOKENS:
        parts = {"text": tokens}
    else:
        parts = {"first tokens": tokens[:_SHOWN_TOKENS], "last tokens": tokens[-_SHOWN_TOKENS:]}
    for title, part in parts.items():
        yield title
        text = loader.tokenizer.decode(part.tolist(), skip_special_tokens=False)
        yield from (f"  | {line}" for line in text.split("\n"))
