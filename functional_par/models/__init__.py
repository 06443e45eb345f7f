"""Language models as plain functions over parameter trees, each the single-process reference of itself."""

from functional_par.models.gpt import gpt
from functional_par.models.llama import llama

__all__ = ["gpt", "llama"]
