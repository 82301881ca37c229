"""Batches of packed samples, with a position that any number of ranks can resume."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from data.corpus import CorpusSettings, StdlibCorpus
from data.packing import PackedStream
from data.store import Split, open_store
from data.tokenizer import require_same_tokenizer, tokenizer_identity

logger = logging.getLogger(__name__)

_STATE_KEYS = {
    "split": "split",
    "tokenizer": "data.tokenizer",
    "seed": "data.seed",
    "held_out": "data.held_out",
    "shuffle_window": "data.shuffle_window",
    "seq_len": "training.seq_len",
    "fingerprint": "data (documents of the corpus)",
}


class PackedLoader(BaseDataLoader):
    """Packed samples, in the same order whatever the number of ranks.

    One step over all ranks takes the next ``dp_world_size * local_batch_size`` samples, in
    shuffled order (infinite) or packed order (finite); rank r takes ``local_batch_size`` of them
    from ``r * local_batch_size`` on. Nothing is read ahead, so that the position is one number:
    the first sample of the next step.

    Attributes:
        sample: the first sample of the next step, over all ranks.
        stream: where samples come from.
        store: the tokenised corpus.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """What to load; the trainer adds ranks, tokenizer and sizes when it builds."""

        corpus: CorpusSettings = field(default_factory=StdlibCorpus)
        """Where the documents come from."""

        split: Split = "train"
        """"train" or "validation" (the documents that ``corpus.held_out`` keeps apart)."""

        infinite: bool = True
        """Start over after the last document; otherwise one epoch, padded to equal ranks."""

        batches_multiple: int = 1
        """A finite epoch has a multiple of this many batches (pipeline: microbatches a step)."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = None,
    ) -> None:
        """Open (or first build) the tokenised corpus.

        Args:
            config: see ``Config``.
            dp_world_size: ranks that load different samples.
            dp_rank: which of them this is.
            tokenizer: must be the one that ``config.corpus.tokenizer`` names.
            seq_len: tokens per sample.
            local_batch_size: samples per rank and step.
            snapshot_every_n_steps: accepted for the trainer; the position is always exact.

        Raises:
            ValueError: settings that ``corpus.check`` refuses, another tokenizer, an unreadable
                document, or an empty split.
        """
        problems = config.corpus.check()
        if problems:
            raise ValueError("\n".join(problems))
        require_same_tokenizer(config.corpus.tokenizer, tokenizer)
        self.config = config
        self.tokenizer = tokenizer
        self.store = open_store(config.corpus, tokenizer)
        documents = self.store.split(config.split, config.corpus.held_out)
        assert tokenizer.eos_id is not None, "corpus.check refuses tokenizers without an end"
        self.stream = PackedStream(
            documents,
            seq_len,
            seed=config.corpus.seed,
            pad_id=tokenizer.eos_id,
            window=config.corpus.shuffle_window,
        )
        self.sample = 0
        self._batch_size = local_batch_size
        self._first = dp_rank * local_batch_size
        self._stride = dp_world_size * local_batch_size
        # Validation builds a loader each time; saying the same again would fill the log.
        level = logging.INFO if config.split == "train" else logging.DEBUG
        logger.log(
            level,
            "%s data: %d documents, %d tokens, %.1f samples of %d tokens per epoch",
            config.split,
            len(documents.chosen),
            self.stream.epoch_tokens,
            self.stream.epoch_tokens / seq_len,
            seq_len,
        )

    @property
    def end(self) -> int | None:
        """The sample after the last, over all ranks; None for an infinite loader.

        Rounded up to whole batches on every rank, with samples in which every label is ignored.
        """
        if self.config.infinite:
            return None
        unit = self._stride * self.config.batches_multiple
        return -(-self.stream.finite_samples // unit) * unit

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield batches from the present position on.

        Each is ``({"input": ids, "positions": positions}, labels)``, all int64 on the CPU, of shape
        (local_batch_size, seq_len). The position has moved when a batch is handed out, so a state
        taken after the batch was used continues with the next one.
        """
        end = self.end
        while end is None or self.sample < end:
            first = self.sample + self._first
            self.sample += self._stride
            yield self._batch(first)

    def _batch(self, first: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        stream = self.stream
        read = stream.shuffled_sample if self.config.infinite else stream.finite_sample
        samples = [read(first + row) for row in range(self._batch_size)]
        tokens, labels, positions = (
            torch.stack([torch.from_numpy(array) for array in arrays])
            for arrays in zip(*samples, strict=True)
        )
        return {"input": tokens, "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what it is a position in; equal on every rank."""
        return {"sample": self.sample, **self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a saved position, on any number of ranks and any batch size.

        Raises:
            ValueError: the position was saved for other data or settings; lists each difference.
        """
        present = self._identity()
        missing = [key for key in ("sample", *present) if key not in state_dict]
        if missing:
            raise ValueError(f"the checkpoint's data position lacks {', '.join(missing)}")
        differences = [
            f"  {_STATE_KEYS[key]}: saved {state_dict[key]!r}, present {value!r}"
            for key, value in present.items()
            if state_dict[key] != value
        ]
        if differences:
            raise ValueError(
                "the checkpoint's data position belongs to other data:\n"
                + "\n".join(differences)
                + "\nrestore these settings, or start the data from its beginning with "
                "checkpoint.exclude_from_loading=[dataloader]"
            )
        self.sample = int(state_dict["sample"])

    def _identity(self) -> dict[str, Any]:
        corpus = self.config.corpus
        return {
            "split": self.config.split,
            "tokenizer": tokenizer_identity(self.tokenizer),
            "seed": corpus.seed,
            "held_out": corpus.held_out,
            "shuffle_window": corpus.shuffle_window,
            "seq_len": self.stream.seq_len,
            "fingerprint": self.store.digest,
        }
