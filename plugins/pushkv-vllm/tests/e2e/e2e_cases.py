"""The prompts of the tests, so that one run of a single server answers all that are asked of a model."""

from __future__ import annotations

from e2e_load import Prompt, make_families, make_prompts

MIXED = make_prompts(1, 112)
"""Of 1 to 4,000 tokens."""
FAMILIES = make_families(2, 4, 8, 1500, 300)
"""Thirty-two prompts of which eight each share a beginning."""
FULL_PROMPTS: list[Prompt] = MIXED + FAMILIES
WINDOWED = make_prompts(3, 32, 3000)
"""For models with windows of 512."""
LATENTS = make_prompts(5, 40, 1000)
"""For models with latent rows, whose attention on CPU is plain and slow."""
SHORT = [prompt for prompt in MIXED if len(prompt) <= 1000]
