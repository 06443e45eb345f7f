"""Token streams and the batches cut from them; which rows a batch has depends on nothing but the seed and the step."""

from functional_par.data.batch import Batch, batches
from functional_par.data.corpus import Corpus
from functional_par.data.sources import load_text, load_tokens, stdlib_text

__all__ = ["Batch", "Corpus", "batches", "load_text", "load_tokens", "stdlib_text"]
