"""Random adapters of tiny models, made by PEFT itself."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["make_adapter", "peft_logits"]


def make_adapter(model: Any, folder: Path, seed: int = 0, **config: Any) -> Any:
    """Save a random adapter of ``model`` to ``folder``; returns PEFT's model."""
    import peft  # takes seconds, in every process that collects tests

    torch.manual_seed(seed)
    defaults = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied embeddings, and that these are saved too
        made = peft.get_peft_model(model, peft.LoraConfig(**(defaults | config)))
    for name, parameter in made.named_parameters():
        if "lora_magnitude" in name:
            parameter.data = parameter.data * (1 + 0.2 * torch.rand_like(parameter))
        elif "lora_" in name:
            parameter.data = torch.randn_like(parameter) * 0.06
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.save_pretrained(folder)
    return made.eval()


def peft_logits(model: Any, ids: list[int]) -> np.ndarray:
    """(tokens, vocab)."""
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([ids])).logits[0].numpy()
    return logits
