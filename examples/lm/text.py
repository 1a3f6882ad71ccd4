"""Text files as batches of tokens."""

import random
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import ByteLevelBPETokenizer, Tokenizer

from .settings import Settings

END = "<|endoftext|>"  # the token after each file
HELD_OUT = 0.05  # of the text: for validation
LEARNED = 10_000_000  # characters from which the tokenizer learns its vocabulary
PIECE = 4096  # files that are tokenized at once: bounds the memory of the tokenizer's results


def standard_library() -> list[Path]:
    """The Python sources that every installation has, without their tests."""
    root, skipped = Path(sysconfig.get_path("stdlib")), {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    return [path for path in sorted(root.rglob("*.py")) if not skipped.intersection(path.relative_to(root).parts)]


def files_in(paths: Iterable[Path]) -> list[Path]:
    """The files among `paths`, and all files in the folders among them."""
    found = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"there is no file or folder {path}")
        found += sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return found


def _read(files: Sequence[Path], most_bytes: int) -> list[str]:
    """The different texts in the files, in random order, until there are `most_bytes`. Binary files are left out."""
    files, texts, size = list(files), {}, 0
    random.Random(0).shuffle(files)  # so that what is held out is like the rest
    for file in files:
        content = file.read_bytes()
        if b"\0" in content[:1024]:
            continue
        text = content.decode("utf-8", errors="ignore")
        if text and text not in texts:
            texts[text] = None
            size += len(content)
        if size >= most_bytes:
            break
    return list(texts)


@lru_cache(maxsize=2)
def _order(count: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


@dataclass(frozen=True)
class Text:
    tokens: np.ndarray  # those to train on, int32
    held_out: np.ndarray
    tokenizer: Tokenizer

    @classmethod
    def prepare(cls, files: Sequence[Path], vocabulary: int, most_bytes: int) -> "Text":
        """Learns a byte-pair tokenizer from the files and tokenizes them."""
        texts = _read(files, most_bytes)
        if not texts:
            raise ValueError("the files have no text")
        size, learned = 0, []
        for text in texts:
            learned.append(text)
            size += len(text)
            if size >= LEARNED:
                break
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(learned, vocab_size=vocabulary, special_tokens=[END], show_progress=False)
        end, parts = tokenizer.token_to_id(END), []
        for start in range(0, len(texts), PIECE):
            encodings = tokenizer.encode_batch(texts[start : start + PIECE])
            parts += [np.array([*encoding.ids, end], np.int32) for encoding in encodings]
        stream = np.concatenate(parts)
        kept = int(len(stream) * (1 - HELD_OUT))
        return cls(stream[:kept], stream[kept:], tokenizer._tokenizer)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save(str(folder / "tokenizer.json"))
        np.save(folder / "held_out.npy", self.held_out)
        np.save(folder / "tokens.npy", self.tokens)

    @classmethod
    def load(cls, folder: Path) -> "Text":
        tokens, held_out = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("tokens", "held_out"))
        return cls(tokens, held_out, Tokenizer.from_file(str(folder / "tokenizer.json")))

    @property
    def vocabulary(self) -> int:
        """The rows of an embedding: one a token, and up to 63 more, so that GPUs can split them."""
        return -(-self.tokenizer.get_vocab_size() // 64) * 64

    def batch(self, settings: Settings, step: int) -> np.ndarray:
        """The tokens of an optimizer step: (accumulation, batch / accumulation, context) int32.

        The text is cut into sequences, and all of them are seen, in random order, before any is seen again. The step
        alone decides which ones: a training that is resumed sees those that it has not seen.
        """
        sequences = _cut(self.tokens, settings.context)
        epochs, places = np.divmod(step * settings.batch + np.arange(settings.batch), len(sequences))
        rows = [
            _order(len(sequences), int(epoch), settings.seed)[place]
            for epoch, place in zip(epochs, places, strict=True)
        ]
        return np.array(sequences[rows]).reshape(settings.accumulation, -1, settings.context)

    def validation(self, settings: Settings, batches: int = 8) -> list[np.ndarray]:
        """Held-out tokens, (batch / accumulation, context) each: at most as many as `batches` batches have."""
        sequences, size = _cut(self.held_out, settings.context), settings.batch // settings.accumulation
        size = min(size, len(sequences))
        parts = min(batches * settings.accumulation, len(sequences) // size)
        return [np.array(sequences[i * size : (i + 1) * size]) for i in range(parts)]


def _cut(tokens: np.ndarray, context: int) -> np.ndarray:
    """As many sequences as there are, (count, context)."""
    if len(tokens) < context:
        raise ValueError(f"{len(tokens)} tokens are fewer than the {context} of a sequence: give more text")
    return tokens[: len(tokens) // context * context].reshape(-1, context)
