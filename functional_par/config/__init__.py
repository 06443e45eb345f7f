"""Configuration: strict YAML with nanotron's names, command-line flags, and what they build."""

from functional_par.config.config import Config

__all__ = ["Config"]
