"""AdamW (arXiv:1711.05101) with open_clip's defaults."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator

from clipstream.training.optim.groups import parameter_groups
from clipstream.training.optim.settings import OptimSettings

if TYPE_CHECKING:
    import torch
    from torch import nn

Betas = tuple[float | None, float | None]  # None: the model's default


class AdamW:
    """torch.optim.AdamW, fused."""

    class Settings(OptimSettings):
        """AdamW. Gains, biases and scales have no weight decay, as in open_clip."""

        type: Literal["adamw"] = "adamw"
        betas: Betas | None = Field(
            None, description="0.9 0.98 if the model's name contains vit, else 0.9 0.999, unless set, both or one"
        )
        eps: float | None = Field(
            None, gt=0, description="1e-6 if the model's name contains vit, else 1e-8, unless set"
        )

        @field_validator("betas")
        @classmethod
        def _betas_in_range(cls, value: Betas | None) -> Betas | None:
            if value is not None and not all(beta is None or 0 <= beta < 1 for beta in value):
                raise ValueError("each beta must be at least 0 and below 1")
            return value

        def defaults(self, model: str) -> tuple[tuple[float, float], float]:
            """Betas and eps; those that are not set follow open_clip's rule (open_clip_train.params).

            Args:
                model: the model's name. A configuration file counts by its stem, as in open_clip.add_model_config.
            """
            name = Path(model).stem if model.endswith(".json") else model
            usual, eps = ((0.9, 0.98), 1e-6) if "vit" in name.lower() else ((0.9, 0.999), 1e-8)
            beta1, beta2 = (
                own if given is None else given for given, own in zip(self.betas or usual, usual, strict=True)
            )
            return (beta1, beta2), self.eps or eps

        def summary(self, model: str) -> str:
            """Betas and eps, for the lines at the start of a run."""
            (beta1, beta2), eps = self.defaults(model)
            return f", betas {beta1:g} {beta2:g}, eps {eps:g}"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __call__(self, towers: nn.Module, model: str) -> torch.optim.Optimizer:
        """See `Optimizer`."""
        from torch.optim import AdamW as TorchAdamW

        betas, eps = self.settings.defaults(model)
        groups = parameter_groups(towers, self.settings.wd)
        return TorchAdamW(groups, lr=self.settings.lr, betas=betas, eps=eps, fused=True)
